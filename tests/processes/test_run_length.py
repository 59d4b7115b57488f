"""Length of a run in steps, tokens or epochs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_overrides, load_typed
from app.engine.files.attempt import Attempt
from app.engine.files.run_folder import read_metrics
from app.engine.run.train import train
from app.errors import ConfigError
from app.planner.plan import Plan
from tests.forks import Process
from tests.training import TINY

PER_STEP = 4 * 32  # tokens of TINY


def test_tokens_make_full_steps():
    tiny = [*TINY, "train.steps=null"]
    assert load_overrides([*tiny, f"train.tokens={5 * PER_STEP}"]).steps == 5
    assert load_overrides([*tiny, f"train.tokens={5 * PER_STEP + 1}"]).steps == 6
    assert load_overrides(["train.tokens=1e6"]).steps == 489
    run = load_overrides([*tiny, "train.tokens=1e5", "optim.decay_steps=null"])
    assert run.decay_steps == run.steps == 782


@pytest.mark.parametrize("given", ["tokens=1e6", "epochs=1.5"])
def test_one_length_is_given(given: str):
    with pytest.raises(ConfigError, match=r"train\.steps=10 is given too"):
        load_overrides(["train.steps=10", f"train.{given}"])
    with pytest.raises(ConfigError, match="must be above 0"):
        load_overrides([f"train.{given.partition('=')[0]}=0"])


def test_plan_of_epochs_asks_for_steps():
    plan = Plan(load_overrides(["train.epochs=2"]))
    with pytest.raises(ConfigError, match="known when the data are read"):
        _ = plan.run.steps


@pytest.mark.parametrize(
    "data", [["data.sources=[{path: a}]"], ["data=hub", "data.name=x", "data.streaming=true"]]
)
def test_epochs_need_one_source_of_known_length(data: list[str]):
    with pytest.raises(ConfigError, match="one source of known length"):
        load_overrides(["train.epochs=2", *data])


@pytest.mark.full
def test_epochs_are_counted_in_the_data(tmp_path: Path):
    (tmp_path / "text.txt").write_text("abcdefg\n" * 240)  # 60 sequences of 32 bytes, and an end
    files = "data=text", f"data.path={tmp_path}/text.txt", f"data.cache_dir={tmp_path}/cache"
    every = (*TINY, *files, "checkpoint.interval=5")

    def steps(folder: str, *words: str) -> list[int]:
        run = load_typed(Typed.parse([*every, *words]))

        def child() -> None:
            os._exit(train(Plan(run), 0, 0, attempt=Attempt()))

        process = Process(target=child)
        process.start()
        process.join(120)
        assert process.exitcode == 0
        rows = read_metrics(tmp_path / folder)
        return [row["step"] for row in rows if "loss" in row]

    one = steps("a", "train.epochs=1", f"run_dir={tmp_path}/a")
    assert one == list(range(1, len(one) + 1)) and 10 < len(one) <= 15
    saved = load_typed(Typed.parse([f"resume={tmp_path}/a"]))
    assert saved.steps == len(one) and saved.train.epochs is None
    # half an epoch more, in the place of the saved steps
    more = steps("b", f"resume={tmp_path}/a", "train.epochs=1.5", f"run_dir={tmp_path}/b")
    assert more[0] == len(one) + 1 and abs(more[-1] - 1.5 * len(one)) < 1.5
