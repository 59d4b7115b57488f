"""Resuming: which settings may differ, and which of several runs resume=auto takes."""

from __future__ import annotations

import copy
import io
import os
import shutil
import types
import typing
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, is_dataclass, replace
from enum import Enum
from pathlib import Path
from time import time
from typing import Any

import pytest

from app.choices import AttentionBackendKind, LayerType
from app.cli.options.compose import load_overrides
from app.cli.options.keys import all_keys
from app.config import (
    DynamicRopeConfig,
    LinearAttentionConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    MLAConfig,
    Run,
    YarnConfig,
)
from app.config.sources import SourceConfig
from app.engine.files.checkpoints import (
    CHECKPOINTS,
    MANIFEST,
    parse_manifest,
)
from app.engine.files.run_folder import note_end, plain
from app.engine.start import resume
from app.engine.start.in_effect import unread
from app.engine.start.start import Start, find_start
from app.errors import ConfigError
from tests.distributed import run_distributed
from tests.processes.resume import FILE, RUN, TINY, Json, saved
from tests.training import ROOT, composed, corpus_in, train_rank

DECISIONS = dict(
    line.split() for line in (ROOT / "tests/golden/resume.txt").read_text().splitlines()
)
WIDER = replace(RUN, model=replace(TINY, hidden_size=64))


NULLABLE = (
    "model.mla",
    "model.linear_attention",
    "model.moe",
    "model.yarn",
    "model.llama3_rope",
    "model.longrope",
    "model.dynamic_rope",
    "hardware.profile",
)  # sections that a run may do without


def leaves() -> list[str]:
    """Every key that has a value, and the sections that may be null."""
    keys = all_keys()
    return [
        key
        for key in keys
        if key in NULLABLE or not any(other.startswith(f"{key}.") for other in keys)
    ]


def test_every_key_is_fixed_or_free():
    """A new key is a decision: tests/golden/resume.txt changes with
    app/engine/start/resume.py.
    """
    assert {key: "fixed" if resume.is_fixed(key) else "free" for key in leaves()} == DECISIONS
    decided = set(leaves())
    assert decided >= resume.FIXED and decided >= resume.FREE, "no key that has gone"


def kind_of(key: str) -> Any:
    """The type of a key."""
    kind: Any = Run
    for name in key.split("."):
        kind = typing.get_type_hints(kind)[name]
        kind = next((each for each in typing.get_args(kind) if is_dataclass(each)), kind)
    return kind


def another(kind: Any, value: Any) -> Any:
    """Another value of a type."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if typing.get_origin(kind) is tuple:
        return [*(value or ()), another(typing.get_args(kind)[0], None)]
    if kind is Any:
        return "other"
    if issubclass(kind, Enum):
        return next(each.value for each in kind if each.value != value)
    return "other" if kind is str else not value if kind is bool else kind((value or 1) + 1)


def with_other(config: Json, key: str) -> Json:
    """The configuration with another value of one key."""
    *sections, name = key.split(".")
    other = section = copy.deepcopy(config)
    for each in sections:
        section = section[each]
    if key in ("data.sources", "data.validation"):
        section[name] = plain([asdict(SourceConfig(label="other"))])
    else:
        section[name] = None if key in NULLABLE else another(kind_of(key), section[name])
    return other


def test_fixed_keys_are_refused_and_free_ones_reported(tmp_path: Path):
    """A run whose configuration differs from the checkpoint's in one key, for every key."""
    latent = replace(TINY, num_kv_heads=TINY.num_heads, mla=MLAConfig(), yarn=YarnConfig())
    unscaled = replace(latent, yarn=None)
    scaled = {
        "model.llama3_rope": replace(unscaled, llama3_rope=Llama3RopeConfig()),
        "model.longrope": replace(unscaled, longrope=LongRopeConfig()),
        "model.dynamic_rope": replace(unscaled, dynamic_rope=DynamicRopeConfig()),
        "model.linear_attention": replace(
            unscaled,
            linear_attention=LinearAttentionConfig(),
            layer_types=(LayerType.linear_attention,),
        ),
    }
    measured = replace(RUN, hardware=load_overrides(["hardware=h200"]).hardware)
    by_torch = replace(RUN.train, attention_backend=AttentionBackendKind.torch)
    measured = replace(measured, parallel=replace(RUN.parallel, dp=1), train=by_torch)
    for number, key in enumerate(leaves()):
        model = scaled.get(".".join(key.split(".")[:2]), latent)
        config = plain(asdict(replace(measured, model=model)))
        checkpoint = saved(tmp_path / str(number), with_other(config, key))
        run = replace(measured, model=model, resume=str(checkpoint))
        if DECISIONS[key] == "fixed":
            with pytest.raises(ConfigError, match="was trained with") as refused:
                find_start(run)
            assert refused.value.key == key
        else:
            told = [change.split(":")[0] for change in find_start(run).changes]
            unread_by_both = (*unread(config), *resume.UNREPORTED)
            assert told == ([] if key.startswith(unread_by_both) and key not in CHOICES else [key])


# Keys that say whether those beside them are read at all.
CHOICES = ("precision.fp8.recipe", "cuda_graph.impl")


def test_unread_fp8_keys_are_not_listed_as_changes(tmp_path: Path):
    """An earlier version had another default; with a recipe, the change would count."""
    config = plain(asdict(RUN))
    checkpoint = saved(tmp_path / "a", with_other(config, "precision.fp8.amax_history"))
    assert find_start(replace(RUN, resume=str(checkpoint))).changes == ()
    config["precision"]["fp8"]["recipe"] = "delayed"
    checkpoint = saved(tmp_path / "b", with_other(config, "precision.fp8.amax_history"))
    told = find_start(replace(RUN, resume=str(checkpoint))).changes
    assert [change.split(":")[0] for change in told] == [
        "precision.fp8.recipe",
        "precision.fp8.amax_history",
    ]


def test_replicas_that_follow_from_processes_are_no_change(tmp_path: Path):
    config = plain(asdict(RUN))
    config["parallel"] |= {"world_size": 1, "dp": None}
    checkpoint = saved(tmp_path / "a", config)
    given = replace(RUN, parallel=replace(RUN.parallel, dp=1), resume=str(checkpoint))
    assert find_start(given).changes == ()
    config["parallel"] |= {"world_size": 8, "tp": 2}
    checkpoint = saved(tmp_path / "b", config)
    told = find_start(replace(given, resume=str(checkpoint))).changes
    assert told == ("parallel.tp: 2 -> 1", "parallel.dp: 4 -> 1")


def test_a_key_that_the_checkpoint_does_not_know_had_its_default(tmp_path: Path):
    config = plain(asdict(RUN))
    for name in ("qkv_bias", "llama3_rope", "init_from"):
        del config["model"][name]
    path = str(saved(tmp_path, config))
    assert find_start(replace(RUN, resume=path)).changes == ()
    biased = replace(RUN, model=replace(RUN.model, qkv_bias=True), resume=path)
    with pytest.raises(ConfigError, match="was trained with false"):
        find_start(biased)


def test_a_section_that_the_checkpoint_does_not_know_is_free(tmp_path: Path):
    config = plain(asdict(RUN))
    del config["hardware"]
    (told,) = find_start(replace(RUN, resume=str(saved(tmp_path, config)))).changes
    assert told.startswith("hardware: None -> ")


@pytest.mark.parametrize(("was", "now"), [(0.0, 0.01), (0.01, 0.02), (0.01, 0.0)])
def test_biases_that_routers_have_learnt_are_not_dropped(tmp_path: Path, was: float, now: float):
    before, after = (
        replace(RUN, model=replace(RUN.model, moe=replace(RUN.model.moe, bias_update_rate=rate)))
        for rate in (was, now)
    )
    after = replace(after, resume=str(saved(tmp_path, before)))
    if now:
        assert find_start(after).changes == (f"model.moe.bias_update_rate: {was} -> {now}",)
        return
    with pytest.raises(ConfigError, match=r"bias_update_rate=0\.0: .* would drop the biases"):
        find_start(after)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs, under the current one."""
    monkeypatch.chdir(tmp_path)
    return Path("runs")


AUTO = replace(RUN, resume="auto")


def test_the_newest_that_fits_is_taken(runs: Path):
    """By the time that manifests tell: files may have been copied since."""
    other = replace(RUN, model=replace(TINY, moe=None))
    older, newer = saved(runs / "c", RUN, 10.0), saved(runs / "a", RUN, 20.0)
    wider, dense = saved(runs / "d", WIDER, 30.0), saved(runs / "b", other, 40.0)
    for age, checkpoint in enumerate((dense, newer, wider, older)):
        os.utime(checkpoint, (age, age))
    start = find_start(AUTO)
    assert (start.checkpoint, start.run_dir) == (newer, runs / "a")
    assert start.passed_over == f"{dense}: model.moe=None there, {{…}} here; and 1 more"
    start = find_start(replace(WIDER, resume="auto"))
    assert (start.checkpoint, start.run_dir) == (wider, runs / "d")
    assert start.passed_over == f"{dense}: model.hidden_size=32 there, 64 here"
    assert (
        find_start(replace(RUN, model=replace(TINY, moe=None), resume="auto")).passed_over is None
    )


def test_run_starts_anew_without_fitting_checkpoint(runs: Path):
    assert find_start(AUTO) == Start(None)
    foreign = saved(runs / "a", WIDER, 10.0)
    assert find_start(AUTO) == Start(
        None, passed_over=f"{foreign}: model.hidden_size=64 there, 32 here"
    )


def test_a_folder_that_was_named_is_not_left(runs: Path):
    saved(runs / "a", WIDER, 20.0)
    saved(runs / "b", RUN, 10.0)
    with pytest.raises(ConfigError, match=r"model.hidden_size=32: .*was trained with 64"):
        find_start(replace(AUTO, run_dir=str(runs / "a")))
    new = find_start(replace(AUTO, run_dir=str(runs / "c")))
    assert new == Start(runs / "c")


def test_manifests_without_a_time_count_by_their_files(runs: Path):
    for name, age in (("a", 200), ("b", 100)):
        os.utime(saved(runs / name), (age, age))
    assert find_start(AUTO).checkpoint.is_relative_to(runs / "a")
    told = saved(runs / "c", RUN, 150.0)
    os.utime(told)
    assert find_start(AUTO).checkpoint.is_relative_to(runs / "a")
    os.utime(runs / "a" / CHECKPOINTS / told.name, (140, 140))
    assert find_start(AUTO).checkpoint == told


def remove_file(checkpoint: Path) -> None:
    (checkpoint / FILE).unlink()


def cut_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text("{")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (remove_file, f"{FILE} is missing"),
        (cut_manifest, "cannot be read"),
    ],
)
def test_resume_reports_broken_newest_checkpoint(
    runs: Path, spoil: Callable[[Path], None], told: str
):
    whole, broken = saved(runs / "a", RUN, 10.0), saved(runs / "b", RUN, time() + 60)
    spoil(broken)
    os.utime(broken)
    with pytest.raises(ConfigError, match=told) as refused:
        find_start(AUTO)
    assert refused.value.value == broken
    foreign = saved(runs / "c", WIDER, time() + 120)
    assert find_start(replace(WIDER, resume="auto")).checkpoint == foreign
    spoil(foreign)
    shutil.rmtree(runs / "b")
    if spoil is cut_manifest:
        with pytest.raises(ConfigError, match=told):  # nobody knows whose it is
            find_start(AUTO)
        return
    start = find_start(AUTO)
    assert start.checkpoint == whole and start.passed_over.startswith(
        f"{foreign}: model.hidden_size=64 there"
    )


def test_resume_refuses_run_without_steps_left(runs: Path):
    saved(runs / "a", RUN, 10.0)
    newest = saved(runs / "b", RUN, 20.0, step=20)
    assert find_start(AUTO) == Start(runs / "b", newest, parse_manifest(newest)), "lacks its end"
    note_end(runs / "b", 20)
    with pytest.raises(
        ConfigError, match=r"train.steps=20: the checkpoint runs/b/.* has already taken 20"
    ):
        find_start(AUTO)
    start = find_start(replace(WIDER, resume="auto"))
    assert start.checkpoint is None and start.passed_over.startswith(
        "runs/b/checkpoints/step-00000020: "
    )


def test_restart_resumes_in_its_folder_despite_newer_runs(runs: Path):
    """The folder was taken when no other run was newer, or when none fitted."""
    own = saved(runs / "a", RUN, 10.0)
    saved(runs / "b", RUN, 20.0)
    assert find_start(AUTO, earlier=runs / "a").checkpoint == own
    (runs / "c").mkdir()
    assert find_start(AUTO, earlier=runs / "c") == Start(runs / "c")


def told_by(rank: int, folder: Path, run: Run) -> dict[str, str]:
    """Return the opening lines of a run that starts in this folder, by their label."""
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as printed:
        assert train_rank(rank, run, {})[0]
    rows = (
        line.strip().split("  ", 1) for line in printed.getvalue().split("\n\n")[0].splitlines()
    )
    return {name: text for name, text in rows}


@pytest.mark.full
def test_two_models_in_one_place(tmp_path: Path):
    """Each resumes its own run and reports the other as passed over; a third model starts anew."""
    settings = (*corpus_in(tmp_path / "corpus"), "resume=auto", "log.console=true")
    told, key = [], "model.moe.ffn_hidden_size"
    for width, steps in ((32, 2), (16, 2), (32, 4), (8, 2)):
        run = composed((*settings, f"train.steps={steps}", f"{key}={width}"), 1)
        told += run_distributed(told_by, 1, tmp_path, run)
    first, second = (f"{rows['folder']}/checkpoints/step-0000000" for rows in told[:2])
    none = "nothing: no checkpoint fits, so this run starts anew"
    assert [(rows["resumed"], rows.get("passed over")) for rows in told] == [
        ("nothing: no checkpoint yet, so this run starts anew", None),
        (none, f"{first}2: {key}=32 there, 16 here"),
        (f"{first}2, after step 2", f"{second}2: {key}=16 there, 32 here"),
        (none, f"{first}4: {key}=32 there, 8 here; and 1 more"),
    ]
    times = [parse_manifest(tmp_path / path)["time"] for path in (f"{second}2", f"{first}4")]
    assert time() - 300 < times[0] < times[1] < time()
