"""Two checkouts that should train the same numbers: what is a difference, and what is run."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

from tests.training import ROOT, composed

TRAIN = """
import json, os, pathlib, sys
import told
chosen = dict(each.split("=", 1) for each in sys.argv[1:])
folder = pathlib.Path(chosen["run_dir"])
folder.mkdir(parents=True)
rows = [{"step": 0, "val_loss": 6.0}, {"step": 1, "loss": told.LOSS, "grad_norm": 1.0},
        {"step": 1, "val_loss": 5.0, "time": folder.stat().st_mtime}]
assert pathlib.Path("train.py").samefile(__file__) and os.environ["OMP_NUM_THREADS"] == "1"
(folder / "metrics.jsonl").write_text("\\n".join(map(json.dumps, rows)))
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("same_losses", ROOT / "bench/same_losses.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(steps: int) -> dict[tuple[int, str], float]:
    keys = ("loss", "grad_norm")
    rows = {(step, key): 5.0 / step for step in range(1, steps + 1) for key in keys}
    return {**rows, (steps, "val_loss"): 4.0}


def test_equal_numbers_do_not_differ(tool: ModuleType):
    assert tool.first_difference(numbers(12), numbers(12), 12) is None


def test_the_first_step_with_any_other_bit_is_named(tool: ModuleType):
    other = numbers(12)
    for place in ((11, "loss"), (2, "grad_norm")):
        other[place] = math.nextafter(other[place], 9.0)
    said = "step 2: grad_norm by +4.44e-16, 2.5 to 2.5000000000000004"
    assert tool.first_difference(numbers(12), other, 12) == said


@pytest.mark.parametrize("place", [(3, "loss"), (12, "grad_norm"), (12, "val_loss")])
def test_what_is_missing_is_a_difference(tool: ModuleType, place: tuple[int, str]):
    full, less = numbers(12), numbers(12)
    del less[place]
    step, key = place
    assert tool.first_difference(full, less, 12) == f"step {step}: no {key} in NEW"
    assert tool.first_difference(less, full, 12) == f"step {step}: no {key} in OLD"
    assert tool.first_difference(less, less, 12) == f"step {step}: no {key} in OLD and NEW"


def test_what_only_one_reports_is_a_difference(tool: ModuleType):
    more = {**numbers(2), (1, "aux_loss"): 0.1}
    assert tool.first_difference(numbers(2), more, 2) == "step 1: no aux_loss in OLD"


@pytest.mark.full
def test_every_configuration_is_one_that_runs(tool: ModuleType):
    for chosen in tool.CONFIGURATIONS.values():
        processes = 2 if any(each.startswith("parallel.") for each in chosen) else 1
        composed([*tool.COMMON, *chosen, "data.path=README.md"], processes)


@pytest.mark.parametrize(("loss", "said"), [
    ("5.5", None),
    ("5.25", "step 1: loss by -0.25, 5.5 to 5.25"),
    ("1 / 0", "NEW: exit code 1: ZeroDivisionError: division by zero"),
])  # fmt: skip
def test_each_checkout_runs_its_own_program(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loss: str,
    said: str | None,
):
    monkeypatch.setattr(tool, "CONFIGURATIONS", {"one": ("model=moe_tiny",)})
    trees = {"OLD": tmp_path / "old", "NEW": tmp_path / "new"}
    for checkout, value in zip(trees.values(), ("5.5", loss), strict=True):
        checkout.mkdir()
        (checkout / "README.md").touch()
        (checkout / "train.py").write_text(TRAIN)
        (checkout / "told.py").write_text(f"LOSS = {value}\n")
    assert tool.differences(trees, 1) == {"one": said}
