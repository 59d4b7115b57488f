"""Nothing grows while a run trains, validates and saves: files, threads, objects, memory."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from app.data.feed import Batch
from app.engine.build import build_engine
from app.engine.files.attempt import Attempt
from app.engine.files.run_folder import FolderLock
from app.engine.ranks.groups import create_groups
from app.engine.run import trainer
from app.engine.start.start import Start, load_all_data
from app.planner.plan import Plan
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.training import composed, corpus_in

MIB = 2**20


@dataclass(frozen=True)
class Held:
    """Resources of a process at a step; all are counts."""

    step: int
    files: int  # open ones
    threads: int
    tensors: int
    objects: int  # that Python's collector knows
    resident: int  # bytes


def held(step: int) -> Held:
    gc.collect()
    objects = gc.get_objects()
    return Held(
        step,
        files=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        tensors=sum(isinstance(each, torch.Tensor) for each in objects),
        objects=len(objects),
        resident=int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
    )


def watched(rank: int, overrides: Sequence[str], ranks: int, every: int) -> list[Held]:
    """Return a rank's resources before every n-th step, while no checkpoint is under way."""
    plan, seen = Plan(composed(overrides, ranks)), []
    groups = create_groups(plan.layout, rank)
    data = load_all_data(plan.run, groups, rank)
    start = Start(Path(plan.run.run_dir or ""))
    training = trainer.Trainer(build_engine(plan, groups, torch.device("cpu")), data, start)
    trainer.sum_up = lambda *facts, **named: None  # this process is about to end
    give = training.feed.next_step

    def next_step() -> list[Batch]:
        if training.progress.step % every == 0:
            training.saver.wait()
            seen.append(held(training.progress.step))
        return give()

    training.feed.next_step = next_step
    with FolderLock() as lock:
        assert training.fit(Attempt(), lock)
    return seen


CASES = {
    "one rank": ("parallel=single",),
    "full iteration captured": ("cuda_graph=full_iteration", "checkpoint.asynchronous=false"),
    "shared experts": ("parallel=ep2",),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "steps"),
    chosen([(name, 400) for name in CASES] + [("one rank", 120)], [("one rank", 120)]),
)
def test_memory_and_files_do_not_grow(name: str, steps: int, tmp_path: Path):
    """From a quarter of the steps on, with checkpoints that replace older ones."""
    ranks = 2 if "2" in CASES[name][0] else 1
    settings = ("checkpoint.interval=10", "train.eval_interval=20", f"run_dir={tmp_path}/run")
    overrides = (*corpus_in(tmp_path / "corpus"), *settings, *CASES[name], f"train.steps={steps}")
    for seen in run_distributed(watched, ranks, overrides, ranks, steps // 8):
        first, *later = seen[2:]
        print(first, *later, sep="\n")
        assert len(later) == 5
        for now in later:
            assert now.files <= first.files
            assert now.threads <= first.threads + 1, "one may just have ended"
            assert now.tensors <= first.tensors + 2, "of the last step or validation"
            assert now.objects <= first.objects + 20, "less than one a save"
            assert now.resident <= first.resident + 12 * MIB, "malloc's fragments are some of it"
