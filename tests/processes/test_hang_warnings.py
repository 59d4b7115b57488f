"""A hang is told of long before the run ends of it, once, and that it is over; work is no hang."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from app.engine.run.train import watch_over
from app.engine.watchdog import collectives
from app.engine.watchdog.activity import Quiet
from app.engine.watchdog.alarms import Alarms
from app.engine.watchdog.collectives import Collective
from app.engine.watchdog.effort import COMPUTING, Effort
from app.engine.watchdog.heartbeats import Doing, Finding, Heartbeats, Record
from app.engine.watchdog.missing import MUTE, SAVING, WARNS, CollectiveWait, Look
from app.engine.watchdog.watchdog import LOOK_S, LOOKS, Watchdog
from tests.forks import Patches, Process
from tests.processes.pipeline import MODELS, run_of
from tests.training import wait_for

TIMEOUT_S = 120.0  # the run would end of a hang after this long
SHORT_LOOK_S = 0.2
Body = Callable[[Watchdog, Path], object]


def doing(words: str = "F0.0", *, quiet: int = 2 * WARNS, **more: object) -> Doing:
    return Doing(words, still_s=quiet * LOOK_S, rests=False, quiet=quiet, **more)


def record(main: Doing, count: int = 6, **more: object) -> Record:
    return Record(main, more.pop("saving", None), {"world": count}, **more)


def found(records: dict[int, Record | None], *, looks: int = 1, **more: bool) -> Finding:
    """Return rank 0's finding about the seventh collective of the world, at one of its looks."""
    store, world = dist.HashStore(), len(records) + 1
    ranks = [Heartbeats.over(store, rank, world) for rank in range(world)]
    wait = CollectiveWait(
        "all_reduce 7 of world",
        WARNS * LOOK_S,
        range(world),
        collective=Collective("world", "all_reduce", 7, since=0.0),
    )
    look = Look(ranks[0], wait, 600.0, **more)
    for number in range(looks):
        for rank, each in records.items():
            if each is not None and (number == 0 or each.main.words != "stopped"):
                ranks[rank].publish(each)
        finding = look.find()
        ranks[0].publish(record(doing(), 7))
    return finding


STANDING = record(doing(moves=3))


def test_rank_without_progress_is_reported():
    finding = found({1: STANDING, 2: record(doing(), 7)})
    assert finding.hangs == "rank 1 has not come, is in F0.0 for 40 s, not computing"
    assert finding.alarm == "1/moves/3"


@pytest.mark.parametrize(
    "works",
    [
        record(doing(busy="computing")),
        record(doing(busy="compiling")),
        record(doing(quiet=WARNS - 1)),
        record(Doing("preparing the corpus", 0.0, rests=True, quiet=2 * WARNS)),
    ],
    ids=["computes", "compiles", "progresses", "rests"],
)
def test_rank_that_works_is_no_hang(works: Record):
    assert found({1: works}).hangs == ""
    beside = found({1: works, 2: STANDING})
    assert beside.hangs.startswith("rank 2 has not come, ") and ";" not in beside.hangs


def test_rank_without_heartbeat_is_reported():
    stopped = record(doing("stopped", quiet=0))
    for each, words in (
        (stopped, r"rank 1 has not come, last sign of life \d+ s ago, in stopped"),
        (None, "rank 1 has not come, and has given no sign of life"),
        (dataclasses.replace(stopped, counts={"world": 7}), r"rank 1 has come, last sign .*"),
    ):
        assert found({1: each}, looks=MUTE).hangs == ""
        assert re.fullmatch(words, found({1: each}, looks=MUTE + 1).hangs)


def test_hang_reported_where_rank_itself_is_missing():
    """Rank 1 waits for rank 2, of which it tells; so rank 0 says nothing."""
    behind = record(doing(), waits="barrier 1 of right", missing=(2,))
    for last in (STANDING, record(doing(busy="computing"))):
        assert found({1: behind, 2: dataclasses.replace(last, counts={"world": 7})}).hangs == ""


def test_ranks_waiting_in_a_cycle_are_reported():
    waits = record(doing(), waits="barrier 1 of left", missing=(0,))
    assert found({1: waits}).hangs == "rank 1 has not come, waits in barrier 1 of left for 0"
    assert found({1: dataclasses.replace(waits, main=doing(quiet=1))}).hangs == ""


def test_collective_with_all_its_ranks_hangs_on_devices_only():
    there = record(doing(), 7, waits="all_reduce 7 of world")
    assert found({1: there}).hangs == ""
    assert found({1: there}, complete=True).hangs == "all its ranks are there"


def test_thread_that_saves_is_judged_by_itself():
    wait = CollectiveWait(
        "all_gather 2 of checkpoint",
        60.0,
        (0, 1),
        collective=Collective(SAVING, "all_gather", 2, since=0.0),
    )
    for saving, told in ((doing("saving"), True), (Doing("writing", 0.0, rests=True), False)):
        first, second = (Heartbeats.over(dist.HashStore(), rank, 2) for rank in range(2))
        second.store = first.store
        second.publish(Record(doing(busy="computing"), saving, {SAVING: 1}))
        assert bool(Look(first, wait, 600.0).find().hangs) == told


def test_one_rank_reports_a_hang():
    store = dist.HashStore()
    ranks = [Heartbeats.over(store, rank, 3) for rank in range(3)]
    assert [each.claim("1/moves/3") for each in (*ranks, *ranks)].count(True) == 1
    assert ranks[2].claim("1/moves/4")


def test_warning_is_printed_once_and_its_end_too(capsys: pytest.CaptureFixture[str]):
    alarms = Alarms(0, timeout_s=600.0, look_s=LOOK_S)
    wait = CollectiveWait("all_reduce 7 of world", 26.0, during="the end of the step")
    for _ in range(2):
        alarms.warn(wait, "rank 1 has not come")
        alarms.resolve([wait])
    assert capsys.readouterr().err == (
        "rank 0 has waited 26 s in all_reduce 7 of world (the end of the step); "
        "rank 1 has not come; if that lasts, the run ends (schedule.timeout_s=600)\n"
    )
    for _ in range(2):
        alarms.resolve([dataclasses.replace(wait, seconds=0.1)])  # the next one of that name
    assert capsys.readouterr().err == "rank 0: all_reduce 7 of world continued after 26 s\n"


def test_default_names_a_hang_within_30_s():
    watchdog = Watchdog(0, run_of(MODELS["dense"], mbs=2, timeout_s=600.0).schedule.timeout_s)
    # each of the threads behind one another, here and on the missing rank, adds a look at most
    assert watchdog.look_s == LOOK_S and (WARNS + 4) * LOOK_S <= 30
    assert Watchdog(0, 20.0).look_s == 20.0 / LOOKS


def test_quiet_counts_looks_since_the_last_move():
    quiet = Quiet()
    for moves, looks in ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1)):
        quiet.look(moves)
        assert quiet.looks == looks


def effort_of(work: Callable[[], object]) -> tuple[Effort, threading.Event]:
    """Effort of a thread that repeats `work` until the event is set."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            work()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    return Effort(thread.ident), over


def test_effort_separates_computing_from_sleeping_thread():
    effort, over = effort_of(lambda: sum(range(10_000)))
    wait_for(lambda: effort.look() == COMPUTING)
    over.set()
    effort, over = effort_of(lambda: over.wait(60))
    for _ in range(5):
        time.sleep(0.1)
        said = effort.look()
    over.set()
    assert said == ""


def test_compiler_counts_as_work_though_it_waits():
    """A compiler waits for the programs that it starts."""
    effort, over = effort_of(lambda: None)
    over.set()
    names = {"__name__": "triton.compiler.compiler"}
    exec("def compile(look): return look()", names)
    assert names["compile"](effort.look) == "compiling"


def sleeps(watchdog: Watchdog, folder: Path) -> None:
    """Rank 1 sleeps until the hang has been told."""
    while "has waited" not in (folder / "said-0").read_text():
        time.sleep(0.5)  # looking more often would count as work


def stops(watchdog: Watchdog, folder: Path) -> None:
    """Rank 1 is stopped once others know it, and continued by another process."""
    wait_for(lambda: watchdog.heartbeats.beats > 0)
    (folder / "stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
    sleeps(watchdog, folder)


def long_enough(watchdog: Watchdog) -> Callable[[], bool]:
    """Return whether a hang would have been reported by now."""
    end = watchdog.heartbeats.beats + 2 * WARNS
    return lambda: watchdog.heartbeats.beats >= end


def computes(watchdog: Watchdog, folder: Path) -> None:
    ends = long_enough(watchdog)
    while not ends():
        hashlib.sha256(bytes(2**20))
        time.sleep(0.005)  # a share of a core is enough


def saves(watchdog: Watchdog, folder: Path) -> None:
    watchdog.rest("saving step-00000002")
    ends = long_enough(watchdog)
    while not ends():
        time.sleep(0.05)


def rank_of(rank: int, folder: Path, body: Body) -> None:
    os.dup2(os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    store = dist.FileStore(str(folder / "store"), 2)
    run = run_of(MODELS["dense"], mbs=2, timeout_s=TIMEOUT_S, dp=2)
    with Patches.context() as patch:
        patch.setattr("app.engine.watchdog.watchdog.LOOK_S", SHORT_LOOK_S)
        watchdog = watch_over(run, rank, store)
        with watchdog.running():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            watchdog.follow({"world": dist.group.WORLD})
            for name in ("F0.0", "B0.0"):
                watchdog.note(name)
                dist.barrier()
                if rank == 1 and name == "F0.0":
                    body(watchdog, folder)
    os._exit(0)


def said_by_rank_0(folder: Path, body: Body) -> str:
    ranks = [Process(target=rank_of, args=(rank, folder, body)) for rank in range(2)]
    (folder / "said-0").touch()
    try:
        for process in ranks:
            process.start()
        if body is stops:
            wait_for(lambda: (folder / "stopped").exists())
            wait_for(lambda: "has waited" in (folder / "said-0").read_text())
            os.kill(ranks[1].pid, signal.SIGCONT)
        for process in ranks:
            process.join(TIMEOUT_S)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert (folder / "said-1").read_text() == ""
    return (folder / "said-0").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "does"),
    [
        (sleeps, r"is in F0\.0 for \d+ s, not computing"),
        (stops, r"last sign of life \d+ s ago, in .*"),
    ],
)
def test_hang_is_reported_once_and_its_end_too(tmp_path: Path, body: Body, does: str):
    name = r"\w+ 2 of world"
    said = rf"rank 0 has waited \d+ s in {name} \(B0\.0\); rank 1 has not come, {does}; .*\n"
    assert re.fullmatch(
        rf"{said}rank 0: {name} continued after \d+ s\n", said_by_rank_0(tmp_path, body)
    )


@pytest.mark.full
@pytest.mark.parametrize("body", [computes, saves])
def test_busy_rank_is_not_reported(tmp_path: Path, body: Body):
    assert said_by_rank_0(tmp_path, body) == ""


def test_collectives_of_all_backends_have_the_same_names(monkeypatch: pytest.MonkeyPatch):
    named = {
        "nccl:_all_gather_base": "all_gather",
        "nccl:all_gather_into_tensor_coalesced": "all_gather",
        "gloo:all_gather": "all_gather",
        "nccl:_reduce_scatter_base": "reduce_scatter",
        "nccl:reduce_scatter_tensor_coalesced": "reduce_scatter",
        "nccl:all_reduce": "all_reduce",
    }
    group = SimpleNamespace(group_name="7")
    monkeypatch.setattr(collectives, "enqueued", lambda _: 0)
    for profiling_name, operation in named.items():
        entry = {
            "profiling_name": profiling_name,
            "process_group": ("7", ""),
            "collective_seq_id": 3,
            "time_created_ns": 0,
            "is_p2p": False,
            "retired": False,
            "state": "scheduled",
        }
        monkeypatch.setattr(collectives, "flight_records", lambda entry=entry: [entry])
        (found,) = collectives.read_recorders({"tp": group}, collectives.NOTHING).under_way
        assert str(found) == f"{operation} 3 (or one before it) of tp"
