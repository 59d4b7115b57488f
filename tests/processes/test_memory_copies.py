"""Copies of ranks' state: what arrives at partners, and which of them ranks agree on."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from app.config import CheckpointConfig, ParallelConfig
from app.engine.checkpoint.load import Progress
from app.engine.ranks.groups import create_groups
from app.engine.recovery import generations
from app.engine.recovery.copier import Copier, late_copies
from app.engine.recovery.copies import Copies
from app.engine.recovery.generations import EndedError, Generations, abort_together
from app.engine.recovery.slot import PART
from app.errors import ConfigError
from app.planner.plan import Plan
from tests.distributed import run_distributed
from tests.forks import Process
from tests.runs import engine_of, make_run, train_steps
from tests.training import wait_for

WORLD = 2


def rank_that_died(rank: int, lost: int | None, harmed: bool) -> tuple[object, ...]:
    """Copy after each of 3 steps, drop or harm copies, agree, restore; return what came back."""
    run = make_run(parallel=ParallelConfig(dp=WORLD, world_size=WORLD))
    engine = engine_of(run, rank)
    copies = Copies(rank, WORLD, 1, pinned=False)
    copier = Copier(engine, copies, {})
    saved: dict[int, list[torch.Tensor]] = {}
    for step in range(1, 4):
        train_steps(run, engine, 1, first=step - 1)
        copier.take(Progress(step, step, 0), {"sequences": step, "stream": None})
        shards = engine.optimizer.param_shards()
        saved[step] = [value.clone() for each in shards for value in each.state.values()]
    copier.wait()
    train_steps(run, engine, 1, first=3)
    if rank == lost:  # a new process
        copies = Copies(rank, WORLD, 1, pinned=False)
    if harmed and lost is not None and rank == (lost + 1) % WORLD:
        copies.held[3 % 2].data[5] ^= 1
    agreed, offers = copies.agree(engine.groups, restarts=0, died_at=0.0, step=4)
    if agreed is None:
        return None, sum(each.damaged for each in offers)
    progress, cursor = copies.restore(engine, agreed)
    now = [value for each in engine.optimizer.param_shards() for value in each.state.values()]
    same = all(map(torch.equal, now, saved[progress.step]))
    return progress.step, same, cursor.state()["sequences"], agreed.serial


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_lost_rank_gets_its_state_back(lost: int | None):
    found = run_distributed(rank_that_died, WORLD, lost, False)
    assert found == [(3, True, 3, 3)] * WORLD


def test_copy_with_wrong_sum_is_passed_over():
    found = run_distributed(rank_that_died, WORLD, 1, True)
    assert found == [(2, True, 2, 2)] * WORLD


def both_die(rank: int) -> object:
    groups = create_groups(Plan(make_run(parallel=ParallelConfig(dp=2, world_size=2))).layout, rank)
    return Copies(rank, WORLD, 1, pinned=False).agree(groups, 1, 1.0, 0)[0]


def test_ranks_without_copies_agree_on_none():
    assert run_distributed(both_die, WORLD) == [None, None]


def test_second_arrival_ends_a_generation(tmp_path: Path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect() -> dist.Store:
        return dist.TCPStore("127.0.0.1", store.port, is_master=False)

    ranks = [Generations(rank, WORLD, connect) for rank in range(WORLD)]

    def meet(each: Generations) -> None:
        threads.append(threading.Thread(target=lambda: met.append(each.begin()), daemon=True))
        threads[-1].start()

    threads: list[threading.Thread] = []
    met: list[dist.Store] = []
    for each in ranks:
        meet(each)
    for thread in threads:
        thread.join()
    assert len(met) == WORLD and not any(each.over.is_set() for each in ranks)
    again = Generations(1, WORLD, connect)  # the process that takes the place of rank 1
    meet(again)
    assert ranks[0].over.wait(60)
    assert ranks[0].is_cause(RuntimeError("anything"))
    ranks[0]._stop()
    meet(ranks[0])
    for thread in threads:
        thread.join()
    assert len(met) == 2 * WORLD and not again.over.is_set()
    for each in (*ranks, again):  # else their threads close connections of other tests
        each._stop()
    for each in (ranks[0], again):
        each.end_run(0)
    with pytest.raises(EndedError):
        ranks[1].begin()


@pytest.mark.parametrize(
    ("parallel", "rule"),
    [
        (ParallelConfig(world_size=1), "this run has one rank"),
        (ParallelConfig(world_size=3, pp=3, gpus_per_node=2), "the last 1 cannot hold"),
    ],
)
def test_copies_that_nothing_can_hold_are_refused(parallel: ParallelConfig, rule: str):
    with pytest.raises(ConfigError, match=rule):
        make_run(parallel=parallel, checkpoint=CheckpointConfig(memory_every=1))


def test_groups_are_numbered_anew_after_a_failed_connection():
    """As they are on a rank that has just been started: otherwise the two would never meet."""
    store = dist.HashStore()
    ranks = Generations(0, 1, lambda: store)
    with pytest.raises(RuntimeError):
        soon = datetime.timedelta(milliseconds=100)
        dist.init_process_group("gloo", rank=0, world_size=2, store=store, timeout=soon)
    assert c10d._world.group_count == 1
    ranks.leave()
    assert c10d._world.group_count == 0


def test_late_copies_are_named_with_what_hides_them():
    assert late_copies(80, 0.30, waited_s=0.005, took_s=9.5) is None
    for every, step_s, waited_s, enough in (
        (10, 1.1, 0.8, 66),
        (20, 1.05, 0.05, 22),
        (1, 2, 1.9, 192),
    ):
        told = late_copies(every, step_s, waited_s=waited_s, took_s=9.5)
        assert told is not None and told.endswith(f"checkpoint.memory_every={enough} hides")
    assert late_copies(1, 120.0, waited_s=0.0305 * 120, took_s=250.4) == (
        "checkpoint.memory_every=1: a step of 120 s waits 3.7 s of that for copies in memory; one "
        "takes 250 s, which checkpoint.memory_every=8 hides"
    )


def shifted(rank: int, world: int, shift: int) -> bool:
    """Send a copy to the partner, each rank one of its own size."""
    copies = Copies(rank, world, shift, pinned=False)
    sizes = [PART + 1, 7, 100, 2 * PART]
    out = torch.full((sizes[rank],), rank + 1, dtype=torch.uint8)
    into = torch.zeros(sizes[copies.kept], dtype=torch.uint8)
    copies._shift(out, into, dist.group.WORLD)
    return bool((into == copies.kept + 1).all())


@pytest.mark.parametrize(("world", "shift"), [(2, 1), (3, 1), (4, 2)])
def test_partners_get_copies_of_any_size(world: int, shift: int):
    assert all(run_distributed(shifted, world, world, shift))


def partner_that_stops(rank: int, folder: Path, sends: bool) -> None:
    """Swap copies, of 256 MiB and of a byte; rank 1, which has the large one if it `sends`, stops
    with most of it still to come.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=store)
    small, large = torch.zeros(1, dtype=torch.uint8), torch.zeros(2**28, dtype=torch.uint8)
    out, into = (large, small) if sends == (rank == 1) else (small, large)
    if rank == 0:
        try:
            Copies(rank, WORLD, 1, pinned=False)._shift(out, into, dist.group.WORLD)
        except RuntimeError as error:
            (folder / "raised").write_text(str(error))
        return
    got = [dist.irecv(part, 0) for part in (*into.split(PART), small.clone())]
    if sends:  # once the other one receives
        got[-1].wait()
    sent = [dist.isend(part, 0) for part in (*out.split(PART), small.clone())]
    sent[0 if sends else -1].wait()  # a part of what is large, or all of what is small
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("sends", [False, True])
def test_partner_that_dies_amid_a_copy_is_noticed(sends: bool, tmp_path: Path):
    ranks = [Process(target=partner_that_stops, args=(n, tmp_path, sends)) for n in range(WORLD)]
    for each in ranks:
        each.start()
    state = Path(f"/proc/{ranks[1].pid}/stat")
    wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", seconds=60)
    ranks[1].kill()
    for each in reversed(ranks):
        each.join(60)
    if ranks[0].is_alive():
        ranks[0].kill()
    assert "by peer" in (tmp_path / "raised").read_text()


def rank_that_stays(port: int) -> None:
    generations.LEAVE_S = 0.5
    ranks = Generations(0, 1, lambda: dist.TCPStore("127.0.0.1", port, is_master=False))
    ranks.begin()
    time.sleep(300)


def test_rank_that_does_not_leave_is_killed():
    """Its supervisor starts it again; the others would wait for it in vain."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = Process(target=rank_that_stays, args=(store.port,))
    process.start()
    wait_for(lambda: store.add("arrivals", 0) == 1, seconds=60)
    time.sleep(2 * generations.LOOK_S)
    assert process.is_alive()
    store.add("arrivals", 1)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_communicators_are_aborted_side_by_side():
    """One that waits for another to be aborted too, as NCCL's do, and one that cannot be."""
    both, aborted = threading.Barrier(2, timeout=30), []

    class Waiting:
        def abort(self) -> None:
            both.wait()
            aborted.append(self)

    class Broken:
        def abort(self) -> None:
            raise RuntimeError

    abort_together([Waiting(), Broken(), Waiting()])
    assert len(aborted) == 2
