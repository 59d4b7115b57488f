"""A rank that stops is named by those that wait for it; one that takes its time is not."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import app.engine.step.records
import app.model.layers.layer_groups
import app.moe.row_collectives
import app.optim.grad_buckets
import app.optim.param_gather
from app.config import Run
from app.engine.build import build_engine
from app.engine.checkpoint import save as checkpoint_save
from app.engine.checkpoint.load import Progress
from app.engine.checkpoint.saver import Saver
from app.engine.ranks.agreement import rank_zero_says
from app.engine.ranks.groups import create_groups
from app.engine.run.train import watch_over
from app.engine.step.engine import Engine
from app.engine.step.executor import Transport
from app.engine.watchdog.activity import ThreadActivity
from app.engine.watchdog.collectives import Collective, Recorded
from app.engine.watchdog.heartbeats import Doing, Finding, Heartbeats, Record
from app.engine.watchdog.watchdog import EXIT_STUCK, Watchdog
from app.plan.actions import P2POp
from app.planner.plan import Plan
from tests.checkpoints import save_checkpoint
from tests.distributed import run_distributed
from tests.forks import POLL_S, Patches, Process
from tests.ports import free_port
from tests.processes.pipeline import MODELS, run_of
from tests.runs import train_steps
from tests.training import wait_for

TIMEOUT_S = 2.0
SLACK_S = 20.0  # for a machine that does many other things
Hang = Callable[[], object]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    sleep()  # if another thread takes the signal, this one runs on for a moment


def sleep() -> None:
    time.sleep(60)


@dataclass(frozen=True)
class World:
    """One rank of a case."""

    rank: int
    run: Run
    watchdog: Watchdog
    folder: Path
    hang: Hang

    def stuck(self) -> None:
        """Hang here, having said when."""
        (self.folder / "stopped").write_text(str(time.time()))
        self.hang()

    def engine(self) -> Engine:
        plan = Plan(self.run)
        self.watchdog.meet("creating the process groups")
        groups = create_groups(plan.layout, self.rank)
        self.watchdog.follow(groups.named())
        self.watchdog.rest("building the model")
        return build_engine(plan, groups, torch.device("cpu"), watchdog=self.watchdog)


Body = Callable[[World], object]


def in_training(module: Any, name: str, group: str) -> Body:
    """Rank 1 hangs where `module` calls `name` for the third time in this group, or with it."""

    def body(world: World) -> None:
        engine, calls, call = world.engine(), [], getattr(module, name)

        def hanging(*args: Any, **options: Any) -> Any:
            if world.rank == 1 and getattr(engine.groups, group) in (*args, *options.values()):
                calls.append(name)
                if len(calls) == 3:
                    world.stuck()
            return call(*args, **options)

        setattr(module, name, hanging)
        train_steps(world.run, engine, 100)

    return body


def in_an_exchange(world: World) -> None:
    engine, post, posted = world.engine(), Transport.post, []

    def hanging(transport: Transport, tensors: Any) -> None:
        posted.append(tensors)
        if world.rank == 1 and len(posted) == 3:
            world.stuck()
        post(transport, tensors)

    Transport.post = hanging
    train_steps(world.run, engine, 100)


def saving(beside: bool) -> Body:
    """Rank 1 hangs when it has written its part of the second checkpoint."""

    def body(world: World) -> None:
        engine, write, written = world.engine(), checkpoint_save.write_synced, []

        def hanging(path: Path, content: Any) -> dict[str, Any]:
            found = write(path, content)
            written.append(path)
            if world.rank == 1 and len(written) == 2:
                world.stuck()
            return found

        checkpoint_save.write_synced = hanging
        saver = Saver(engine, lambda: None) if beside else None
        for step in (1, 2):
            folder, progress = world.folder / "checkpoints", Progress(step, step, 0)
            if saver is None:
                save_checkpoint(
                    folder, engine, world.run, progress=progress, cursor={"sequences": 0}
                )
            else:
                saver.save(folder, progress, {})
                saver.wait()

    return body


def gathering(world: World) -> None:
    """Rank 1 hangs where rank 0 gathers what the ranks have written."""
    engine = world.engine()
    if world.rank == 1:
        dist.distributed_c10d.gather = lambda *_, **__: world.stuck()
    progress = Progress(1, 1, 0)
    save_checkpoint(world.folder / "checkpoints", engine, world.run, progress=progress, cursor={})


def at_the_start(world: World) -> None:
    if world.rank == 1:
        world.stuck()
    world.engine()


def keeping_the_store(world: World) -> None:
    """Rank 0 hangs where it was to say something, and with it the store."""
    engine = world.engine()
    world.watchdog.rest("choosing")
    rank_zero_says(engine.groups, lambda: 1)
    rank_zero_says(engine.groups, world.stuck)


def preparing(world: World) -> None:
    """Rank 0 waits for rank 1, and that for rank 2, which takes long, alive, and then stops."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    of_ranks = [{"left": pairs[0]}, {"left": pairs[0], "right": pairs[1]}, {"right": pairs[1]}]
    world.watchdog.follow(of_ranks[world.rank])
    world.watchdog.rest("preparing the corpus")
    if world.rank == 2:
        time.sleep(2 * TIMEOUT_S)
        world.stuck()
    for pair in pairs[world.rank :: -1] if world.rank < 2 else pairs[1:]:
        dist.barrier(pair)


@dataclass(frozen=True)
class Case:
    """Kind of hang, and the report of the first rank that waits."""

    body: Body
    says: str  # after "rank N is stuck in "; a regular expression
    parallel: dict[str, int] = field(default_factory=lambda: {"dp": 2})
    model: str = "dense"
    missing: int = 1
    hang: Hang = stop
    tcp: bool = False  # the store is in the process of rank 0
    first: int = 0  # the rank that waits for it


def training(module: Any, name: str, group: str, says: str, **more: Any) -> Case:
    return Case(in_training(module, name, group), rf"{says} \d+ of {group} \(.+\)", **more)


CASES = {
    "tp": training(
        app.model.layers.layer_groups,
        "all_gather_each",
        "tp",
        says="all_gather",
        parallel={"tp": 2},
    ),
    "cp": training(
        app.model.layers.layer_groups, "all_gather", "cp", says="all_gather", parallel={"cp": 2}
    ),
    "dp": training(app.optim.param_gather, "all_gather", "dp_cp", says="all_gather"),
    "ep": training(
        app.moe.row_collectives,
        "_uneven_all_to_all",
        "etp_ep",
        says="all_to_all",
        parallel={"dp": 2, "ep": 2},
        model="moe",
    ),
    "edp": Case(
        in_training(app.optim.param_gather, "all_gather", "edp"),
        r"all_gather \d+ of (edp|dp_cp) \(.+\)",  # both overlap with other work
        model="moe",
    ),
    "world": training(
        app.engine.step.records, "all_reduce", "world", says="all_reduce", hang=sleep
    ),
    "reduce": training(
        app.optim.grad_buckets,
        "reduce_scatter",
        "dp_cp",
        says="(reduce_scatter|all_reduce)",  # gloo's is an all-reduce
    ),
    "gather": Case(gathering, r"gather \d+ of host \(saving step-00000001\)"),
    "pp": Case(in_an_exchange, r"V\[.*\]", parallel={"pp": 2}),
    "host": Case(saving(beside=False), r"all_gather \d+ of host \(saving step-00000002\)"),
    "checkpoint": Case(
        saving(beside=True), r"all_gather \d+ of checkpoint \(saving step-00000002\)"
    ),
    "start": Case(at_the_start, "creating the process groups"),
    "store": Case(
        keeping_the_store, r"broadcast \d+ of host \(choosing\)", missing=0, tcp=True, first=1
    ),
    "rest": Case(
        preparing,
        r"barrier 1 of right \(preparing the corpus\)",
        missing=2,
        parallel={"dp": 3},
        first=1,
    ),
}


def rank_of(case: Case, rank: int, folder: Path, port: int) -> None:
    """One process of a case."""
    os.dup2(os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    run = run_of(MODELS[case.model], mbs=2, timeout_s=TIMEOUT_S, **case.parallel)
    if case.tcp:
        store = dist.TCPStore("127.0.0.1", port, run.world_size, is_master=rank == 0)
    else:
        store = dist.FileStore(str(folder / "store"), run.world_size)
    watchdog = watch_over(run, rank, store)
    with watchdog.running():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=run.world_size)
        case.body(World(rank, run, watchdog, folder=folder, hang=case.hang))
    os._exit(0)


@dataclass
class Outcome:
    """How a case ended."""

    code: int | None  # exit code of the first process to end
    seconds: float  # from where one hung to there
    said: list[str]  # by rank


def carried_out(cases: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """All cases at once, since they mostly wait."""
    ranks: dict[str, list[Process]] = {}
    for name in cases:
        (folder / name).mkdir()
        count = math.prod(CASES[name].parallel.values()) if name != "ep" else 2
        arguments, port = (folder / name,), free_port()
        ranks[name] = [
            Process(target=rank_of, args=(CASES[name], rank, *arguments, port))
            for rank in range(count)
        ]
    processes = [
        (name, rank, process)
        for name, all_ranks in ranks.items()
        for rank, process in enumerate(all_ranks)
    ]
    try:
        for _, _, process in processes:
            process.start()
        ended = awaited({process: name for name, _, process in processes})
    finally:
        for _, _, process in processes:
            process.kill()
            process.join()
    return {name: outcome(folder / name, len(ranks[name]), ended.get(name)) for name in cases}


def awaited(processes: dict[Process, str]) -> dict[str, tuple[int, float]]:
    """Exit code of the first process of each case to end, and when it did by the wall clock."""
    ended: dict[str, tuple[int, float]] = {}
    deadline = time.monotonic() + 60
    while len(ended) < len(set(processes.values())) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for process, name in processes.items():
            if name not in ended and not process.is_alive() and process.exitcode is not None:
                ended[name] = process.exitcode, time.time()
    return ended


def outcome(folder: Path, ranks: int, ended: tuple[int, float] | None) -> Outcome:
    code, at = ended or (None, math.inf)
    return Outcome(
        code,
        at - float((folder / "stopped").read_text()),
        [(folder / f"said-{r}").read_text() for r in range(ranks)],
    )


def check(name: str, found: Outcome) -> None:
    case = CASES[name]
    assert found.code == EXIT_STUCK and 0 < found.seconds < 1.5 * TIMEOUT_S + SLACK_S, (name, found)
    whom = "; the key-value store does not answer" if case.tcp else f"; rank {case.missing} "
    stuck = rf"rank {case.first} is stuck in {case.says} for \d s \(schedule.timeout_s=2\)"
    said = rf"{stuck}(; under way: .*)?{whom}"
    # a warning may stand before it
    assert re.search(f"^{said}", found.said[case.first], re.MULTILINE), (name, found)


# what each kind of collective of a run is called in a report
KINDS = (
    "all_gather",
    "(reduce_scatter|",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "barrier",
    r"V\[",
)


def test_each_kind_of_collective_has_a_case():
    for kind in KINDS:
        assert any(case.says.startswith(kind) for case in CASES.values()), kind


SHORT = ("tp", "pp", "checkpoint", "start", "rest")


def test_waiting_ranks_name_the_operation_and_who_is_missing(tmp_path: Path):
    for name, found in carried_out(SHORT, tmp_path).items():
        print(name, found)
        check(name, found)


@pytest.mark.full
def test_in_every_group(tmp_path: Path):
    for name, found in carried_out([name for name in CASES if name not in SHORT], tmp_path).items():
        print(name, found)
        check(name, found)


def meeting(rank: int, folder: Path, timeout_s: float) -> None:
    """Meet the other rank for a while."""
    store = dist.FileStore(str(folder / "store"), 2)
    watchdog = watch_over(run_of(MODELS["dense"], mbs=2, timeout_s=timeout_s, dp=2), rank, store)
    with watchdog.running():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        watchdog.follow({"world": dist.group.WORLD})
        for _ in range(40):
            watchdog.note("F0.0")
            dist.barrier()
            (folder / f"met-{rank}").touch()
            time.sleep(0.05)
    os._exit(0)


@pytest.mark.full
def test_a_job_may_be_suspended(tmp_path: Path):
    """By SIGSTOP and SIGCONT, as schedulers do: time in which no rank ran does not count."""
    ranks = [Process(target=meeting, args=(rank, tmp_path, 2.0)) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        wait_for(lambda: all((tmp_path / f"met-{rank}").exists() for rank in range(2)))
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in ranks:
                os.kill(process.pid, number)
            time.sleep(3)
        for process in ranks:
            process.join(30)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.join()


class Moving:
    """Unfinished work during whose inspection the main thread posts more."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def is_completed(self) -> bool:
        self.transport.moving[op(len(self.transport.moving))] = self
        return False


def op(mb: int) -> P2POp:
    return P2POp("F", mb, 0, peer=1, send=True)


def test_unfinished_tolerates_concurrent_changes():
    transport = Transport(dist.ProcessGroup, [4, 5])
    transport.moving[op(0)] = Moving(transport)
    assert transport.unfinished() == [("F0.0>1 (to rank 5)", 5)]
    assert len(transport.moving) == 2


def exchange_under_capture(rank: int) -> tuple[list[tuple[str, int]], float]:
    transport = Transport(dist.group.WORLD, [0, 1])
    mine = P2POp("F", 0, 0, peer=1 - rank, send=rank == 0)
    tensor = torch.tensor(float(5 - rank))
    with Patches.context() as patch:
        patch.setattr("app.engine.step.executor._capturing", lambda: True)
        transport.post({mine: tensor})
    unfinished = transport.unfinished()
    transport.wait([mine])
    transport.forget()
    return unfinished, tensor.item()


def test_watchdog_asks_nothing_of_captured_transfers():
    """A query of an event that is being captured invalidates the capture."""
    assert run_distributed(exchange_under_capture, 2) == [([], 5.0), ([], 5.0)]


def heartbeats(store: dist.Store, ranks: int) -> list[Heartbeats]:
    return [Heartbeats.over(store, rank, ranks) for rank in range(ranks)]


def test_operation_has_two_judges_that_others_replace():
    """At any size of the group, or all would read the records of all."""
    ranks, finders = heartbeats(dist.HashStore(), 8), []

    def ask(each: Heartbeats, patience_s: float = 60.0) -> Finding | None:
        def find() -> Finding:
            finders.append(each.rank)
            return Finding((5,), words=f"says {each.rank}")

        return each.share("world/0/7", find, patience_s)

    for _ in range(2):
        found = [ask(each) for each in ranks]
        assert finders == [0, 1] and [finding.words for finding in found[2:]] == ["says 1"] * 6
        finders.clear()
    time.sleep(0.02)
    assert ask(ranks[4], patience_s=0.01).words == "says 1" and finders == []
    assert ask(ranks[4]).words == "says 4", "the others have written nothing new"
    assert ask(ranks[7]).words == "says 4"


def test_records_of_ranks_that_are_there():
    first, second, _ = heartbeats(dist.HashStore(), 3)
    record = Record(
        Doing("F0.0", 1.5, False),
        Doing("saving", 0.0, True),
        {"dp": 7},
        waits="all_reduce 8 of dp_cp",
        missing=(1,),
        excuse=2,
    )
    first.publish(record)
    seen = second.read(range(3))
    assert seen[1].record is None and seen[2].record is None
    assert dataclasses.replace(seen[0].record, at=0.0, beat=0) == record
    time.sleep(0.02)
    assert second.read([0])[0].silent_s >= 0.02
    first.publish(record)
    assert second.read([0])[0].silent_s < 0.02


def test_saving_thread_waits_in_dropped_collective():
    watchdog = Watchdog(0, 100.0)
    watchdog.rest("training on")
    watchdog.saving.rest("writing")
    assert watchdog.waits() == []
    watchdog.saving.note("saving step-00000002")
    watchdog._recorded = Recorded({"checkpoint": 5})
    with Patches.context() as patch:
        patch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
        watchdog.groups = {"checkpoint": None}
        (wait,) = watchdog.waits()
    assert (
        str(wait) == "collective 5 of checkpoint (saving step-00000002)"
        and wait.key == "checkpoint/0/5"
    )


def test_a_single_rank_that_saves_waits_for_nobody():
    watchdog = Watchdog(0, 100.0)
    watchdog.saving.note("saving step 3")
    assert watchdog.waits() == []


def test_a_rank_rests_until_it_enters_a_collective():
    activity = ThreadActivity()
    activity.rest("preparing the corpus")
    before, after = (
        Collective("dp_cp", "all_gather", 3, since=activity.began + seconds) for seconds in (-1, 1)
    )
    assert activity.rests([]) and activity.rests([before]) and not activity.rests([before, after])
    activity.note("F0.0")
    assert not activity.rests([])


def test_replayed_steps_are_identified_by_number():
    """Nobody records what it waits for, nor a collective behind it where the update is inside."""
    watchdog = Watchdog(0, 0.0, replays=True)
    watchdog.heartbeats = types.SimpleNamespace(world_size=2)
    for number in (1, 2):
        watchdog.rest("between steps")
        assert watchdog.waits() == [] and watchdog._record([]).counts["replays"] == number - 1
        watchdog.step("forwards and backwards of a step")
        (wait,) = watchdog.waits()
        assert wait.key == f"replays/0/{number}"
        assert watchdog._record([]).counts["replays"] == number
