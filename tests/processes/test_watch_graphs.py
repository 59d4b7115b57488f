"""A rank that stops within a replay is named with action, layer and collective.

Collectives of replays are hidden from the watchdog here, as they are on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from app.choices import DispatcherKind
from app.config import CudaGraphConfig, ParallelConfig, Run, ScheduleConfig
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups
from app.engine.run.train import watch_over
from app.engine.step.step import TrainingStep
from app.engine.watchdog.activity import ThreadActivity
from app.engine.watchdog.collectives import Collective
from app.engine.watchdog.heartbeats import Doing, Heartbeats, Record
from app.engine.watchdog.marks import MarkedGraph, Marks
from app.engine.watchdog.missing import LEFT, CollectiveWait, Look
from app.engine.watchdog.watchdog import EXIT_STUCK, Watchdog
from app.planner.plan import Plan
from tests.distributed import run_distributed
from tests.forks import POLL_S, Patches, Process
from tests.processes.captured import CHOICES, MODELS, STEPS, run_of
from tests.runs import batches_of, engine_of

MOE = dataclasses.replace(MODELS["moe"].moe, dispatcher=DispatcherKind.static)
STATIC = {**MODELS, "static": dataclasses.replace(MODELS["moe"], moe=MOE)}
TIMEOUT_S = 2.0
SLACK_S = 20.0  # for a machine that does many other things
Hang = Callable[[], object]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    sleep()


def sleep() -> None:
    time.sleep(60)


@dataclass(frozen=True)
class Case:
    """Rank 1 hangs in a replay, before the n-th mark of this operation; what rank 0 says."""

    operation: str  # "": at a phase
    nth: int
    says: str
    parallel: ParallelConfig
    graph: str = "full iteration"
    model: str = "dense"
    hang: Hang = sleep
    missing: str = r"rank 1 has not come, is in "  # of what rank 0 says behind


AT = r"F\d\.0, layer \d attn"
CASES = {
    "tp": Case("all_gather", 3, rf"all_gather \d+ of tp in graphs \({AT}; next: .*\)",
               ParallelConfig(tp=2),
               missing=r"rank 1 has not come, is in .*F\d\.0, layer \d (attn|mlp)"),
    "tp, stopped": Case("all_gather", 3, rf"all_gather \d+ of tp in graphs \({AT}; next: .*\)",
                        ParallelConfig(tp=2), hang=stop,
                        missing="rank 1 has not come, last sign of life "),
    "tp, at a phase": Case("", 3, r"all_gather \d+ of tp in graphs \(F\d\.0, .*; next: .*\)",
                           ParallelConfig(tp=2),
                           missing=r"rank 1 has not come, is in .*F\d\.0"),
    "tp, parts": Case("all_gather", 3, rf"all_gather \d+ of tp in graphs \({AT}; next: .*\)",
                      ParallelConfig(tp=2), graph="layer"),
    "dp": Case("reduce_scatter", 1, r"reduce_scatter \d+ of dp_cp in graphs \(.*; next: .*\)",
               ParallelConfig(dp=2)),
    "ep": Case("all_to_all", 1, r"all_to_all \d+ of etp_ep in graphs \(F0\.0, layer \d .*\)",
               ParallelConfig(dp=2, ep=2), model="static"),
    "pp": Case("", 2, r"V\[.*\] of a graph \(next: .*\)", ParallelConfig(pp=2),
               missing=r"rank 1 is in F0\.0, layer 2 attn of a graph"),
}  # fmt: skip


def case_run(case: Case) -> Run:
    return run_of(
        STATIC[case.model],
        dataclasses.replace(CHOICES[case.graph], marks=True),
        parallel=case.parallel,
        schedule=ScheduleConfig(timeout_s=TIMEOUT_S),
    )


def hang_in_replay(case: Case, folder: Path) -> None:
    """Have this rank hang before a mark of a replay."""
    put, seen = MarkedGraph.put, []

    def hanging(graph: MarkedGraph, mark: Any, last: bool = False) -> None:
        inside = mark.operation == case.operation and (case.operation or mark.place)
        if graph.recorded and inside:
            seen.append(mark)
            if len(seen) == case.nth:
                (folder / "stopped").write_text(str(time.time()))
                case.hang()
        put(graph, mark, last)

    MarkedGraph.put = hanging


def rank_of(case: Case, rank: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    run = case_run(case)
    store = dist.FileStore(str(folder / "store"), run.world_size)
    watchdog = watch_over(run, rank, store)
    with Patches.context() as patch:
        patch.setattr(
            "app.engine.watchdog.watchdog.count_enqueued", lambda _, before: before.counts
        )
        patch.setattr("app.engine.watchdog.watchdog.read_recorders", lambda _, before: before)
        with watchdog.running():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=run.world_size)
            plan = Plan(run)
            groups = create_groups(plan.layout, rank)
            watchdog.follow(groups.named())
            engine = build_engine(plan, groups, torch.device("cpu"), watchdog=watchdog)
            if rank == 1:
                hang_in_replay(case, folder)
            step = TrainingStep(engine)
            for n in range(STEPS):
                step(batches_of(run, n, engine.groups.dp_rank), 1e-3, 0.0)
    os._exit(0)


def said_by_rank_0(case: Case, folder: Path) -> tuple[int | None, float, str]:
    """Exit code of rank 0, seconds from the hang to its end, and what it said."""
    ranks = [Process(target=rank_of, args=(case, rank, folder)) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 60
        while ranks[0].is_alive() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        code, at = ranks[0].exitcode, time.time()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return code, at - float((folder / "stopped").read_text()), (folder / "said-0").read_text()


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_rank_that_stops_in_a_replay_is_named(tmp_path: Path, name: str):
    case = CASES[name]
    code, seconds, said = said_by_rank_0(case, tmp_path)
    print(said)
    assert code == EXIT_STUCK and 0 < seconds < 1.5 * TIMEOUT_S + SLACK_S
    waits = rf"rank 0 is stuck in {case.says} for \d s \(schedule.timeout_s=2\)(; under way: .*)?"
    assert re.search(rf"^{waits}; {case.missing}", said, re.MULTILINE), said


def losses(rank: int, run: Run, watched: bool) -> tuple[list[tuple[float, float]], int]:
    """Losses and norms of some steps; marks passed."""
    torch.manual_seed(rank)
    watchdog = Watchdog(rank, 100.0) if watched else None
    plan = Plan(run)
    groups = create_groups(plan.layout, rank)
    engine = build_engine(plan, groups, torch.device("cpu"), watchdog=watchdog)
    step, seen = TrainingStep(engine), []
    for n in range(STEPS):
        report, _ = step(batches_of(run, n, engine.groups.dp_rank), 1e-3, 0.0)
        seen.append((report.loss, report.grad_norm))
    marks = engine.watchdog.marks
    engine.release()
    assert marks is None or marks.position() is None, "no replay is under way"
    return seen, 0 if marks is None else marks.passed()


def both(rank: int, run: Run) -> list[tuple[list[tuple[float, float]], int]]:
    return [losses(rank, run, watched) for watched in (False, True)]


@pytest.mark.parametrize("name", ["tp", pytest.param("ep", marks=pytest.mark.full)])
@pytest.mark.parametrize("graph", ["full iteration", "layer"])
def test_marks_change_no_bit(name: str, graph: str):
    case = dataclasses.replace(CASES[name], graph=graph)
    for without, marked in run_distributed(both, 2, case_run(case)):
        assert without[0] == marked[0] and without[1] == 0 < marked[1]


def test_runs_without_graphs_or_watchdog_have_no_marks():
    def built(rank: int) -> list[object]:
        eager = run_of(MODELS["dense"], CudaGraphConfig())
        captured = run_of(MODELS["dense"], dataclasses.replace(CHOICES["layer"], marks=True))
        plan = Plan(eager)
        watched = build_engine(
            plan,
            create_groups(plan.layout, rank),
            torch.device("cpu"),
            watchdog=Watchdog(0, 1.0),
        )
        return [watched.watchdog.marks, engine_of(captured).watchdog.marks]

    assert built_alone(built) == [None, None]


def built_alone(work: Callable[[int], list[object]]) -> list[object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return work(0)
    finally:
        dist.destroy_process_group()


def marked_graph(places: int) -> tuple[Marks, MarkedGraph]:
    """A graph with this number of phases, recorded once."""
    marks = Marks(torch.device("cpu"), ThreadActivity())
    marks.activity.note("F0.0")
    graph = marks.new_graph()
    graph.launch("F0.0")
    with marks.recording(graph):
        for place in range(places):
            marks.enter(f"layer {place} attn")
    marks.recorded(graph)
    return marks, graph


def test_position_lies_between_two_marks():
    marks, graph = marked_graph(3)
    assert marks.position() is None and marks.passed() == 5
    graph.launch("F2.0")
    marks.activity.note("F3.0")  # the host is ahead
    with marks.recording(graph):
        marks.enter("layer 0 attn")
        position = marks.position()
        assert position is not None
        assert (str(position), position.next_words) == ("F2.0, layer 0 attn", "layer 1 attn")
        marks.enter("layer 1 attn")
        marks.enter("layer 2 attn")
        position = marks.position()
        assert position is not None and position.next_words == "its end"
    assert marks.position() is None and marks.passed() == 10


def test_marks_without_room_are_left_out():
    with Patches.context() as patch:
        patch.setattr("app.engine.watchdog.marks.ROOM", 4)
        patch.setattr("app.engine.watchdog.marks.LEAST", 4)
        marks, graph = marked_graph(7)
        assert [mark.place for mark in graph.marks] == ["", "layer 0 attn", "layer 1 attn", ""]
        marked = marks.new_graph()
        assert len(marked.slots) == 4, "more memory was taken"


def test_rank_behind_a_collective_waits_for_no_one():
    """Others have begun the next one: this rank is in the work behind it."""
    store = dist.HashStore()
    own, other = (Heartbeats.over(store, rank, 2) for rank in range(2))
    wait = CollectiveWait(
        "all_gather 7 of tp in graphs",
        40.0,
        (0, 1),
        collective=Collective("tp in graphs", "all_gather", 7, since=0.0),
        in_graph=True,
    )
    for count, words in ((8, LEFT), (7, "all its ranks are there")):
        other.publish(Record(Doing("F0.0", 40.0, False), None, {"tp in graphs": count},
                             waits=wait.name))  # fmt: skip
        assert Look(own, wait, 600.0).find().words == words
