"""Names of other programs: the table is whole, its overrides compose, both pages agree with it."""

from __future__ import annotations

import re

import pytest

from app.cli.options.compose import load_overrides
from app.cli.options.keys import all_keys, is_section
from app.cli.options.other_names import page, row_of, rows
from app.cli.options.unknown import no_such_key
from tests.integration.from_megatron import ROWS
from tests.override_types import check_types
from tests.training import ROOT

pytestmark = pytest.mark.docs

ALL = [row for _, listed in rows() for row in listed]
GROUPS = {path.name for path in (ROOT / "conf").iterdir()}
NEEDED = {
    "data=hub": ["data.name=x"],
    "data=jsonl": ["data.path=x"],
    "precision.fp8.recipe": ["precision=bf16"],
    "model.moe.static": ["model.moe.dispatcher=static"],
    "cuda_graph.scope": ["model=dense_tiny"],
    "precision.fp8.first_layers": ["precision=bf16", "precision.fp8.recipe=current"],
    "attention_backend=transformer_engine": ["precision=bf16"],
    "precision.grads=bfloat16": ["precision=bf16"],
    "lora.base=nf4": ["lora.rank=8", "precision=bf16", "checkpoint.frozen=false"],
    "precision.grads=float16": ["precision=fp16"],
    "interleaved": ["parallel.pp=2"],
    "zero_bubble_v": ["parallel.pp=2"],
}  # part of an override -> what it needs beside it


def test_a_name_has_one_row():
    names = [name for row in ALL for name in row.names]
    assert len(names) == len(set(names)) > 400
    assert all(row.ours or row.note for row in ALL)


def test_a_key_of_the_table_is_one_of_ours():
    keys = set(all_keys())
    for row in (row for row in ALL if row.key):
        assert row.key in keys and not is_section(row.key), row
        named = re.findall(r"\b(?:parallel|train|model|optim|data)\.[a-z_.]+[a-z_]", row.note)
        assert set(named) <= keys, row


CHOICES = [(row.names[0], value) for row in ALL for value, _ in row.choices if value != "*"]


def test_the_overrides_of_a_value_are_of_its_type():
    names = {*all_keys(), *GROUPS}
    for name, value in CHOICES:
        words = row_of(name).overrides(value)
        assert words and all(word.split("=")[0] in names for word in words), name
        check_types(words)


@pytest.mark.every(14)
@pytest.mark.parametrize(("name", "value"), CHOICES)
def test_the_overrides_of_a_value_compose(name: str, value: str):
    words = row_of(name).overrides(value)
    text = " ".join(words)
    needed = [each for part, more in NEEDED.items() if part in text for each in more]
    load_overrides([*needed, *words])


def test_values_are_converted():
    assert row_of("--distributed-timeout-minutes").overrides("10") == ("schedule.timeout_s=600",)
    assert row_of("trainer.precision").overrides("bf16-mixed") == ("precision=bf16",)
    assert row_of("training.global_batch_size").overrides("64") == ("train.global_batch=64",)
    assert row_of("--bf16").overrides("") == row_of("bf16").overrides("True") == ("precision=bf16",)
    assert row_of("resume_from_checkpoint").overrides("x/y") == ("resume=x/y",)
    assert row_of("dataset").overrides("a/b") == ("data=hub", "data.name=a/b")
    assert row_of("optimizer").overrides("sgd") == () and row_of("nonsense") is None


def test_the_page_shows_the_table():
    """`python -m app.cli.options.other_names` prints what belongs behind its first paragraphs."""
    shown = (ROOT / "docs/other-names.md").read_text()
    assert shown.endswith("\n".join(page()).lstrip("\n") + "\n")


def pairs() -> list[tuple[str, str]]:
    """Arguments and keys of docs/from-megatron.md in rows with as many of one as of the other."""
    found = []
    for theirs, ours, _ in ROWS:
        names, keys = (re.findall(r"`([^`]+)`", cell) for cell in (theirs, ours))
        if len(names) == len(keys) and set(keys) <= set(all_keys()):
            found += [(n, k) for n, k in zip(names, keys, strict=True) if "…" not in n]
    return found


def test_both_pages_call_an_argument_the_same():
    """By a row of the table, or since only one key of ours has that name."""
    assert len(pairs()) > 60
    for name, key in pairs():
        row = row_of(name)
        told = no_such_key(name.lstrip("-").replace("-", "_"), "7") if row is None else row
        assert key in str(told), (name, key, told)
