"""Steps whose numbers are not finite: going on, ending, and going back, with one and with two
processes.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from app.choices import BadStep
from app.config import CheckpointConfig, PrecisionConfig, Run, TrainConfig
from app.engine.build import build_engine
from app.engine.files.attempt import Attempt
from app.engine.files.checkpoints import complete_checkpoints, newest_checkpoint
from app.engine.files.run_folder import FolderLock, read_metrics
from app.engine.ranks.agreement import rank_zero_says
from app.engine.ranks.groups import create_groups
from app.engine.run import trainer
from app.engine.run.bad_steps import BadSteps, is_bad
from app.engine.run.train import train
from app.engine.start.start import find_start, load_all_data
from app.engine.step.engine import Engine
from app.engine.step.records import StepInput, StepReport
from app.errors import DIVERGED, ConfigError, Diverged
from app.optim.scale import LossScale
from app.planner.plan import Plan
from tests.cases import chosen, sampled
from tests.checkpoints import verify_checkpoint
from tests.distributed import run_distributed
from tests.forks import Process
from tests.runs import make_run
from tests.training import composed, corpus_in, untimed

LAYOUTS = chosen(["parallel.dp=1", "parallel.dp=2"], ["parallel.dp=2"])
Poison = Callable[[trainer.Trainer], None]  # is done to a trainer before it trains


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return corpus_in(tmp_path_factory.mktemp("corpus"))


def bad_data(*numbers: int, rank: int | None = None) -> Poison:
    """The n-th batches since the process began give a loss that is not a number, on one rank or
    on all.
    """

    def poison(training: trainer.Trainer) -> None:
        step, count = training.training_step.eager, [0]

        def poisoned(given: StepInput) -> Any:
            count[0] += 1
            if count[0] in numbers and rank in (None, training.engine.groups.rank):
                weights_M = given.loss_weights_M * math.nan
                given = dataclasses.replace(given, loss_weights_M=weights_M)
            return step(given)

        training.training_step.eager = training.training_step.captured = poisoned

    return poison


def bad_parameter(step: int) -> Poison:
    """After that step one element of one parameter, on the rank that owns it, is no number: what
    a broken memory does.
    """

    def poison(training: trainer.Trainer) -> None:
        give = training.feed.next_step

        def next_step() -> Any:
            if (
                training.progress.step == step
                and not training.bad_steps.rollbacks
                and training.is_rank_zero
            ):
                spoil(training.engine)
            return give()

        training.feed.next_step = next_step

    return poison


def spoil(engine: Engine) -> None:
    for chunk in range(len(engine.chunks)):
        engine.optimizer.gather_params(chunk)
    next(iter(engine.optimizer.param_shards())).main[0] = math.nan


def train_poisoned(
    rank: int, run: Run, poisons: Sequence[Poison]
) -> tuple[str, list[list[int]], int]:
    """How a run ends, "" for well; the first tokens of each batch; and its rollbacks."""
    plan = Plan(run)
    groups = create_groups(plan.layout, rank)
    start = rank_zero_says(groups, lambda: find_start(run))
    training = trainer.Trainer(
        build_engine(plan, groups, torch.device("cpu")), load_all_data(run, groups, rank), start
    )
    trainer.sum_up = lambda *facts, **named: None  # this process is about to end
    for poison in poisons:
        poison(training)
    seen, give = [], training.feed.next_step

    def next_step() -> Any:
        batches = give()
        seen.append(batches[0].tokens_BS[0].tolist())
        return batches

    training.feed.next_step = next_step
    try:
        with FolderLock() as lock:
            training.fit(Attempt(), lock)
    except Diverged as end:
        return str(end), seen, training.bad_steps.rollbacks
    return "", seen, training.bad_steps.rollbacks


def poisoned(
    corpus: tuple[str, ...],
    folder: Path,
    layout: str,
    policy: str,
    *poisons: Poison,
    steps: int = 8,
) -> Any:
    """Return what rank 0 of a poisoned run saw; it saves checkpoints every 3 steps."""
    overrides = (
        *corpus,
        layout,
        f"train.steps={steps}",
        "checkpoint.interval=3",
        *policy.split(),
        f"run_dir={folder}/run",
    )
    world_size = int(layout[-1])
    results = run_distributed(train_poisoned, world_size, composed(overrides, world_size), poisons)
    assert all(
        (end, rollbacks) == (results[0][0], results[0][2]) for end, _, rollbacks in results
    ), "the ranks agree"
    return results[0]


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    """The rows of a run's steps; each step has one."""
    rows = [row for row in read_metrics(folder / "run") if "loss" in row]
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row for row in rows}


def saved_steps(folder: Path) -> list[int]:
    return [
        verify_checkpoint(path)["step"] for path in complete_checkpoints(folder / "run/checkpoints")
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_steps_are_skipped(corpus: tuple[str, ...], tmp_path: Path, layout: str):
    """Learning rate and updates stand still; two in a row are not three."""
    end, seen, _ = poisoned(
        corpus, tmp_path, layout, "train.max_bad_steps=3", bad_data(2, 5, 6, rank=0)
    )
    assert end == "" and len(seen) == 8
    rows = steps_of(tmp_path)
    assert [row["skipped"] for row in rows.values()] == [0, 1, 0, 0, 1, 1, 0, 0]
    assert rows[3]["lr"] == rows[2]["lr"] and rows[7]["lr"] == rows[5]["lr"] != rows[4]["lr"]
    assert math.isnan(rows[5]["loss"]) and math.isfinite(rows[7]["loss"])
    assert verify_checkpoint(newest_checkpoint(tmp_path / "run"))["updates"] == 5


@pytest.mark.full
def test_a_skipped_step_might_as_well_not_have_been(corpus: tuple[str, ...], tmp_path: Path):
    """Its data are gone, and nothing else: a run whose feed leaves them out has the same losses,
    to the bit.
    """

    def leave_out(training: trainer.Trainer) -> None:
        give, count = training.feed.next_step, [0]

        def next_step() -> Any:
            count[0] += 1
            if count[0] == 3:
                give()
            return give()

        training.feed.next_step = next_step

    poisoned(corpus, tmp_path / "bad", "parallel.dp=1", "", bad_data(3), steps=8)
    poisoned(corpus, tmp_path / "whole", "parallel.dp=1", "", leave_out, steps=7)
    losses = {
        name: [row["loss"] for row in steps_of(tmp_path / name).values()]
        for name in ("bad", "whole")
    }
    assert losses["bad"][:2] + losses["bad"][3:] == losses["whole"]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_too_many_in_a_row_end_the_run(corpus: tuple[str, ...], tmp_path: Path, layout: str):
    end, seen, _ = poisoned(corpus, tmp_path, layout, "train.max_bad_steps=3", bad_data(2, 4, 5, 6))
    newest = tmp_path / "run/checkpoints/step-00000003"
    assert end == (
        "step 6 has loss nan and gradient norm nan; 3 such steps in a row (train.max_bad_steps); "
        f"the newest checkpoint is {newest}"
    )
    assert len(seen) == 6 and saved_steps(tmp_path) == [3]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stop_ends_at_the_first(corpus: tuple[str, ...], tmp_path: Path, layout: str):
    end, seen, _ = poisoned(corpus, tmp_path, layout, "train.on_bad_step=stop", bad_data(3, rank=0))
    assert (
        end
        == "step 3 has loss nan and gradient norm nan (train.on_bad_step=stop); nothing was saved"
    )
    assert len(seen) == 3 and list(steps_of(tmp_path)) == [1, 2, 3] and saved_steps(tmp_path) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spoiled_state_is_never_saved(corpus: tuple[str, ...], tmp_path: Path, layout: str):
    """A parameter has gone bad before step 5, and step 6 is one that would be saved."""
    end, *_ = poisoned(corpus, tmp_path, layout, "", bad_parameter(4))
    newest = tmp_path / "run/checkpoints/step-00000003"
    assert end == (
        "step 6 was to be saved, but parameters or moments are not finite; the newest "
        f"checkpoint is {newest}"
    )
    assert saved_steps(tmp_path) == [3]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "poison", sampled([bad_data(5, rank=0), bad_parameter(4)], 2), ids=["data", "parameter"]
)
def test_rollback_resumes_with_other_data(
    corpus: tuple[str, ...], tmp_path: Path, layout: str, poison: Poison
):
    """From step 3, behind the data of step 5; what follows is what a run would see whose feed
    leaves out those of 4 and 5.
    """

    def leave_out(training: trainer.Trainer) -> None:
        give = training.feed.next_step

        def next_step() -> Any:
            for _ in range(2 if training.progress.step == 3 else 0):
                give()
            return give()

        training.feed.next_step = next_step

    end, seen, rollbacks = poisoned(
        corpus, tmp_path / "bad", layout, "train.on_bad_step=rollback", poison
    )
    assert (end, rollbacks, len(seen)) == ("", 1, 10)
    assert len({str(tokens) for tokens in seen}) == 10, "no data come twice"
    _, other, _ = poisoned(corpus, tmp_path / "whole", layout, "", leave_out)
    assert seen[:3] + seen[5:] == other
    losses = {
        name: [row["loss"] for row in steps_of(tmp_path / name).values()]
        for name in ("bad", "whole")
    }
    assert losses["bad"] == losses["whole"] and len(losses["bad"]) == 8
    assert [row for row in untimed(tmp_path / "bad/run") if "rollbacks" in row] == [
        {"step": 3, "rollback_from": 5, "rollbacks": 1}
    ]
    assert saved_steps(tmp_path / "bad") == [6, 8]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollbacks_are_limited(corpus: tuple[str, ...], tmp_path: Path, layout: str):
    policy = "train.on_bad_step=rollback train.max_rollbacks=2"
    end, seen, rollbacks = poisoned(corpus, tmp_path, layout, policy, bad_data(5, 7, 8))
    newest = tmp_path / "run/checkpoints/step-00000003"
    assert end == (
        "step 4 has loss nan and gradient norm nan, after 2 rollbacks (train.max_rollbacks); "
        f"the newest checkpoint is {newest}"
    )
    assert (len(seen), rollbacks) == (8, 2)


@pytest.mark.full
def test_rollback_without_a_checkpoint_ends(corpus: tuple[str, ...], tmp_path: Path):
    end, *_ = poisoned(corpus, tmp_path, "parallel.dp=1", "train.on_bad_step=rollback", bad_data(2))
    assert end == (
        "step 2 is not finite, and there is no checkpoint to go back to "
        "(train.on_bad_step=rollback); nothing was saved"
    )


def test_rollback_needs_checkpoints():
    train = TrainConfig(
        steps=20, seq_len=16, micro_batch=2, global_batch=8, on_bad_step=BadStep.rollback
    )
    with pytest.raises(
        ConfigError,
        match=r"train.on_bad_step=rollback: goes back to checkpoints, and checkpoint.interval=0",
    ):
        make_run(train=train, checkpoint=CheckpointConfig(interval=0))


def test_an_overflow_that_a_smaller_loss_scale_mends_is_not_bad():
    zeros = dict.fromkeys((field.name for field in dataclasses.fields(StepReport)), 0)
    fine, overflow, nan = (
        dataclasses.replace(
            StepReport(**zeros), step=1, loss=loss, skipped=skipped, grad_norm=math.inf
        )
        for loss, skipped in ((1.0, 0), (1.0, 1), (math.nan, 1))
    )
    assert [is_bad(report, None) for report in (fine, overflow, nan)] == [False, True, True]
    precision = PrecisionConfig(loss_scale_hysteresis=1, initial_loss_scale=4.0, min_loss_scale=2.0)
    scale = LossScale(precision, torch.tensor(4.0), 4.0)
    assert [is_bad(report, scale) for report in (fine, overflow, nan)] == [False, False, True]
    scale.update(True)
    assert is_bad(overflow, scale), "it cannot fall any further"
    constant = dataclasses.replace(precision, loss_scale=8.0)
    assert is_bad(overflow, LossScale(constant, torch.tensor(8.0), 8.0))
    judged = BadSteps(TrainConfig(on_bad_step=BadStep.stop))
    assert judged.rolls_back(overflow, LossScale(precision, torch.tensor(4.0), 4.0)) is False


def exit_code(run: Run) -> int:
    """Return the exit code of a process that trains."""

    def child() -> None:
        os._exit(train(Plan(run), 0, 0, attempt=Attempt()))

    process = Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "hangs"
    return process.exitcode


def test_its_own_exit_code_and_one_line(
    corpus: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    overrides = (
        "optim.lr=1e15",
        "train.steps=20",
        "train.max_bad_steps=3",
        "checkpoint.interval=0",
        f"run_dir={tmp_path}/run",
    )
    assert exit_code(composed((*corpus, *overrides), 1)) == DIVERGED == 65
    said = capfd.readouterr().err
    assert said.startswith("train.py: step ") and said.count("\n") == 1
    assert said.endswith("; 3 such steps in a row (train.max_bad_steps); nothing was saved\n")
