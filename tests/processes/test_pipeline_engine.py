"""Pipeline engine beyond numbers: memory, messages of failures and hangs, large worlds."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.config import Run
from app.engine.ranks.groups import create_groups
from app.engine.step.executor import InFlight
from app.engine.watchdog.watchdog import EXIT_STUCK, Watchdog
from app.plan.layout import ParallelLayout
from app.plan.schedule import peak_in_flight
from tests.distributed import run_distributed
from tests.processes.pipeline import MODELS, run_of
from tests.runs import engine_of, train_steps


def most_alive(rank: int, run: Run) -> tuple[int, int]:
    """Most microbatches that wait for their backward, counted per chunk: measured and planned."""
    engine, seen, forward = engine_of(run, rank), [], InFlight.forward

    def counted(in_flight: InFlight, mb: int, chunk: int) -> None:
        forward(in_flight, mb, chunk)
        seen.append(len(in_flight.roots.keys() | in_flight.weight_grads.keys()))

    InFlight.forward = counted
    train_steps(run, engine, 1)
    return max(seen), peak_in_flight(engine.plan.actions[engine.groups.pp_rank])


COUNTED = (
    dict(mbs=8, pp=4),
    dict(mbs=6, pp=2, schedule="gpipe"),
    dict(mbs=6, pp=2, vpp=3),
    dict(mbs=8, pp=4, schedule="zero_bubble_h1"),
    dict(mbs=6, pp=2, vpp=2, schedule="zero_bubble_v"),
)


@pytest.mark.every(3)
@pytest.mark.parametrize("choice", COUNTED, ids=str)
def test_no_more_microbatches_are_alive_than_planned(choice: dict[str, Any]):
    run = run_of(MODELS["dense"], **choice)
    for measured, planned in run_distributed(most_alive, run.world_size, run):
        assert measured == planned


def sent_memory(rank: int, run: Run) -> list[int]:
    """Bytes that the outputs of this rank's forwards still hold after the step's last forward."""
    engine, outputs, pass_on = engine_of(run, rank), [], InFlight._pass_on

    def kept(in_flight: InFlight, place: tuple[int, int], output: torch.Tensor) -> None:
        outputs.append(output)
        pass_on(in_flight, place, output)

    InFlight._pass_on = kept
    train_steps(run, engine, 1)
    return [output.untyped_storage().nbytes() for output in outputs]


def test_outputs_give_their_memory_back_once_sent():
    first, last = run_distributed(sent_memory, 2, run_of(MODELS["dense"], mbs=4, pp=2))
    assert first == [0] * 4 and last == []


def failing(rank: int, run: Run) -> list[str]:
    """Return the error when the forward of microbatch 2 on rank 1 fails; empty on rank 0."""
    engine, forward = engine_of(run, rank), InFlight.forward

    def broken(in_flight: InFlight, mb: int, chunk: int) -> None:
        if rank == 1 and mb == 2:
            raise RuntimeError("no such kernel")
        forward(in_flight, mb, chunk)

    InFlight.forward = broken
    try:
        train_steps(run, engine, 1)
    except RuntimeError as error:
        return getattr(error, "__notes__", [])
    return []


def test_a_failing_action_is_pointed_at():
    notes = run_distributed(failing, 2, run_of(MODELS["dense"], mbs=4, pp=2))[1]
    assert (
        len(notes) == 1
        and ">>> F2.0 <<<" in notes[0]
        and notes[0].startswith("while running this rank's actions: ")
    )


def held_up(rank: int, run: Run) -> tuple[str, list[int]]:
    """Return a rank's report and exit codes while rank 0 sleeps in its second forward."""
    engine, forward, codes, words = engine_of(run, rank), InFlight.forward, [], io.StringIO()

    def slow(in_flight: InFlight, mb: int, chunk: int) -> None:
        if rank == 0 and mb == 1:
            time.sleep(3.0)
        forward(in_flight, mb, chunk)

    InFlight.forward, sys.stderr = slow, words
    with engine.watchdog.running(end=codes.append):
        train_steps(run, engine, 1)
    return words.getvalue(), codes


@pytest.mark.full
def test_every_rank_reports_where_it_is_stuck():
    run = run_of(MODELS["dense"], mbs=4, pp=2, timeout_s=0.8)
    (first, codes), (second, others) = run_distributed(held_up, 2, run)
    assert first.startswith("rank 0 is stuck in F1.0 for 1 s") and codes == [EXIT_STUCK]
    assert (
        second.startswith("rank 1 is stuck in ")
        and "from rank 0" in second
        and others == [EXIT_STUCK]
    )


@pytest.mark.full
def test_a_resting_rank_is_never_stuck(capsys: pytest.CaptureFixture[str]):
    watchdog = Watchdog(3, 0.1)
    with watchdog.running(end=pytest.fail):
        time.sleep(0.3)
        for _ in range(20):
            watchdog.note("F0.0")
            time.sleep(0.02)
        watchdog.rest()
        time.sleep(0.3)
    assert capsys.readouterr().err == ""


def dry_run(_: int, layout: ParallelLayout, rank: int) -> dict[str, list[int]]:
    """The groups that one rank of a large world finds itself in."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    groups = create_groups(layout, rank)
    return {
        name: dist.get_process_group_ranks(getattr(groups, name))
        for name in ("dp_cp", "edp", "etp_ep", "pp")
    }


@pytest.mark.parametrize("rank", [0, 1234, 4095])
def test_a_dry_run_of_4096_ranks(rank: int):
    layout = ParallelLayout(4096, pp=8, ep=64)
    (found,) = run_distributed(dry_run, 1, layout, rank)
    for axis, name in {"dp": "dp_cp", "pp": "pp", "edp": "edp", "ep": "etp_ep"}.items():
        groups = layout.groups(axis, expert=axis in ("edp", "ep"))
        assert found[name] == next(ranks for ranks in groups if rank in ranks)
