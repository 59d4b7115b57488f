"""A rank that stops within a replay is named with action, layer and collective.

Collectives of graphs run in groups that the watchdog does not know, so that it sees no more of them
than on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
from app.engine.watchdog.marks import MarkedGraph, Marks, _MarksCollectives
from app.engine.watchdog.missing import LEFT, CollectiveWait, Look
from app.engine.watchdog.watchdog import EXIT_STUCK, Watchdog
from app.planner.plan import Plan
from tests.distributed import run_distributed
from tests.forks import POLL_S, Patches, Process
from tests.processes.captured import CHOICES, MODELS, STEPS, run_of
from tests.runs import batches_of, engine_of

STATIC = dataclasses.replace(MODELS["moe"].moe, dispatcher=DispatcherKind.static)
PADDED = dataclasses.replace(MODELS["moe"].moe, pad_to_capacity=True, capacity_factor=2.0)
ALL_MODELS = {
    **MODELS,
    "static": dataclasses.replace(MODELS["moe"], moe=STATIC),
    "padded": dataclasses.replace(MODELS["moe"], moe=PADDED),
}
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
    """A rank hangs in a replay, before the n-th mark of this operation; what the other one says."""

    operation: str  # "": behind the mark of a phase, in which it thus is
    nth: int
    says: str
    parallel: ParallelConfig
    graph: str = "full iteration"
    model: str = "dense"
    hang: Hang = sleep
    missing: str = r"rank 1 has not come, is in "  # of what it says behind
    action: str = ""  # "F" or "B": only in these
    hangs: int = 1  # the rank


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
               missing=r"rank 1 is in F0\.0, layer 2 mlp of a graph"),
}  # fmt: skip
# Parts of layers: sends, reductions and, with `partial`, dispatch are outside of graphs. By layout
# and graph: the model, in what rank 0 waits, and the n-th phase of forwards and backwards
EP = ParallelConfig(dp=2, ep=2)
SENT, REDUCED, EXCHANGED = (
    r"V\[B\d\.0<1\]",
    r"all_reduce \d+ of e?dp(_cp)? \(.*\)",
    (r"all_(to_all|gather) \d+ of etp_ep( in graphs)? \([FB]\d\.0.*\)"),
)
PARTS = {
    "pp, partial": (ParallelConfig(pp=2), "dense", SENT, {"F": (2, "2 mlp"), "B": (2, "3 attn")}),
    "pp, layer": (ParallelConfig(pp=2), "dense", SENT, {"F": (2, "2 mlp"), "B": (2, "3 attn")}),
    "dp, partial": (ParallelConfig(dp=2), "moe", REDUCED, {"F": (2, "0 mlp"), "B": (3, "3 norm")}),
    "dp, layer": (ParallelConfig(dp=2), "dense", REDUCED, {"F": (4, "1 mlp"), "B": (4, "2 attn")}),
    "ep, partial": (EP, "moe", EXCHANGED, {"F": (5, "1 shared"), "B": (4, "3 attn")}),
    "static, partial": (EP, "static", EXCHANGED, {"F": (5, "1 shared"), "B": (4, "3 attn")}),
    "static, layer": (EP, "static", EXCHANGED, {"F": (10, "1 combine"), "B": (4, "3 dispatch")}),
    "padded, partial": (EP, "padded", EXCHANGED, {"F": (5, "1 shared"), "B": (4, "3 attn")}),
    "padded, layer": (EP, "padded", EXCHANGED, {"F": (8, "1 dispatch"), "B": (4, "3 dispatch")}),
}  # fmt: skip
CASES |= {
    f"{name}, {action}": Case("", nth, says, parallel, graph=name.split(", ")[1], model=model,
        missing=rf"rank 1( has not come,)? is in {action}\d\.0, layer {place} of a graph",
        action=action)
    for name, (parallel, model, says, phases) in PARTS.items()
    for action, (nth, place) in phases.items()
}  # fmt: skip
CASES["pp, partial, first stage"] = Case(
    "", 2, r"V\[F\d\.0<0\]", ParallelConfig(pp=2), graph="partial", hangs=0,
    missing=r"rank 0 is in F\d\.0, layer 0 mlp of a graph",
)  # fmt: skip
SHORT = ("pp, partial, B", "padded, layer, B")


def case_run(case: Case) -> Run:
    return run_of(
        ALL_MODELS[case.model],
        dataclasses.replace(CHOICES[case.graph], marks=True),
        parallel=case.parallel,
        schedule=ScheduleConfig(timeout_s=TIMEOUT_S),
    )


def hang_in_replay(case: Case, folder: Path) -> None:
    """Have this rank hang before a mark of a replay."""
    put, seen = MarkedGraph.put, []

    def hanging(graph: MarkedGraph, mark: Any, last: bool = False) -> None:
        inside = mark.operation == case.operation and (case.operation or mark.place)
        meant = graph.recorded and inside and mark.action.startswith(case.action)
        if meant:
            seen.append(mark)
        if meant and not case.operation:
            put(graph, mark, last)
        if meant and len(seen) == case.nth:
            (folder / "stopped").write_text(str(time.time()))
            case.hang()
        if case.operation or not meant:
            put(graph, mark, last)

    MarkedGraph.put = hanging


def hide_graphs(named: Mapping[str, dist.ProcessGroup]) -> None:
    """Run the collectives of graphs in groups of their own."""
    mark = _MarksCollectives.around
    hidden = {each.group_name: dist.new_group([0, 1])
              for _, each in sorted(named.items()) if each.size() > 1}  # fmt: skip

    def hiding(mode: Any, operation: str, group: Any, values: Any, call: Any) -> Any:
        if mode.marks.current is None or group.group_name not in hidden:
            return mark(mode, operation, group, values, call)
        place = list(values).index("process_group")
        boxed = hidden[group.group_name].boxed()
        arguments = [boxed if n == place else each for n, each in enumerate(call.args)]
        keywords = {name: boxed if name == "process_group" else each
                    for name, each in call.keywords.items()}  # fmt: skip
        other = partial(call.func, *arguments, **keywords)
        return mark(mode, operation, group, values, other)

    _MarksCollectives.around = hiding


def rank_of(case: Case, rank: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    run = case_run(case)
    store = dist.FileStore(str(folder / "store"), run.world_size)
    watchdog = watch_over(run, rank, store)
    with watchdog.running():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=run.world_size)
        plan = Plan(run)
        groups = create_groups(plan.layout, rank)
        watchdog.follow(groups.named())
        hide_graphs(groups.named())
        engine = build_engine(plan, groups, torch.device("cpu"), watchdog=watchdog)
        if rank == case.hangs:
            hang_in_replay(case, folder)
        step = TrainingStep(engine)
        for n in range(STEPS):
            step(batches_of(run, n, engine.groups.dp_rank), 1e-3, 0.0)
    os._exit(0)


def said_by_the_other(case: Case, folder: Path) -> tuple[int | None, float, str]:
    """Exit code of the rank that waits, seconds from the hang to its end, and what it said."""
    waits = 1 - case.hangs
    ranks = [Process(target=rank_of, args=(case, rank, folder)) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 60
        while ranks[waits].is_alive() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        code, at = ranks[waits].exitcode, time.time()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return (
        code,
        at - float((folder / "stopped").read_text()),
        (folder / f"said-{waits}").read_text(),
    )


@pytest.mark.parametrize(
    "name",
    [each if each in SHORT else pytest.param(each, marks=pytest.mark.full) for each in CASES],
)
def test_rank_that_stops_in_a_replay_is_named(tmp_path: Path, name: str):
    case = CASES[name]
    code, seconds, said = said_by_the_other(case, tmp_path)
    print(said)
    assert code == EXIT_STUCK and 0 < seconds < 1.5 * TIMEOUT_S + SLACK_S
    stuck = rf"rank {1 - case.hangs} is stuck in {case.says} for \d s \(schedule.timeout_s=2\)"
    assert re.search(rf"^{stuck}(; under way: .*)?; {case.missing}", said, re.MULTILINE), said


def test_backward_marks_follow_the_work():
    """Not what gradients arrive first: a norm also hands on its input."""

    def places(rank: int) -> list[object]:
        run = case_run(Case("", 0, "", ParallelConfig(), graph="layer", model="moe"))
        plan = Plan(run)
        groups = create_groups(plan.layout, rank)
        watched = Watchdog(rank, 100.0)
        engine = build_engine(plan, groups, torch.device("cpu"), watchdog=watched)
        step = TrainingStep(engine)
        for n in range(STEPS):
            step(batches_of(run, n, 0), 1e-3, 0.0)
        graphs = [[mark.place for mark in graph.marks if mark.place and not mark.operation]
                  for graph in engine.watchdog.marks.graphs]  # fmt: skip
        engine.release()
        return graphs

    found = built_alone(places)
    forwards = [graph for graph in found if graph[0].endswith("attn")]
    assert len(forwards) == len(found) / 2
    for forward in forwards:
        back = [place for place in reversed(forward) if not place.endswith("preprocess")]
        assert back in found, (back, found)


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


def test_hanging_device_behind_its_host_is_named():
    store = dist.HashStore()
    own, other = (Heartbeats.over(store, rank, 2) for rank in range(2))
    wait = CollectiveWait("all_to_all 7 of ep", 40.0, (0, 1),
                          collective=Collective("ep", "all_to_all", 7, since=0.0))  # fmt: skip
    other.publish(Record(Doing("the end of the step", 40.0, False), None, {"ep": 9},
                         waits="F1.0, layer 0 mlp of a graph", during="next: its end"))  # fmt: skip
    words = "rank 1 has come, is in F1.0, layer 0 mlp of a graph (next: its end) for 40 s"
    assert Look(own, wait, 600.0).find().words == words


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
