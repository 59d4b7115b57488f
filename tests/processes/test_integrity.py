"""Replays find flipped bits and name their rank, and change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.choices import DispatcherKind
from app.config import CudaGraphConfig, ParallelConfig, Run, TrainConfig
from app.engine.integrity.check import IntegrityCheck
from app.engine.integrity.trace import TracedTransport
from app.engine.step.engine import Engine
from app.engine.step.executor import Transport
from app.engine.step.step import TrainingStep
from app.plan.actions import P2POp
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes.captured import EAGER, FOUR, LAYOUTS, MODELS, UPDATING, WHOLE, local
from tests.runs import batches_of, engine_of, make_run, whole_parameters

STATIC = dataclasses.replace(FOUR.moe, dispatcher=DispatcherKind.static)
KINDS = {**MODELS, "static": dataclasses.replace(FOUR, moe=STATIC)}
STEPS = 4  # with graphs: eager, captured, replayed twice


def run_of(
    parallel: ParallelConfig, graph: CudaGraphConfig = EAGER, model: str = "moe", **sections: Any
) -> Run:
    return make_run(KINDS[model], parallel=parallel, cuda_graph=graph, **sections)


def checked(rank: int, run: Run, every: int | None) -> tuple[list[float], dict[str, Any]]:
    """Losses of some steps and the parameters after them, with checks or without."""
    torch.manual_seed(rank)
    engine = engine_of(run, rank)
    step = TrainingStep(engine)
    check = None if every is None else IntegrityCheck(step, every)
    losses = []
    for n in range(STEPS):
        batches = batches_of(run, n, engine.groups.dp_rank)
        report, _ = step(batches, run.optim.lr, run.optim.weight_decay)
        losses += [report.loss, report.grad_norm]
        if check is not None:
            assert check.after(n + 1, batches) is None
    engine.release()
    return losses, {name: each.numpy() for name, each in whole_parameters(engine).items()}


def with_and_without(rank: int, run: Run) -> bool:
    losses, params = checked(rank, run, every=1)
    plain, expected = checked(rank, run, every=None)
    return losses == plain and all((params[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("layout", chosen(LAYOUTS, ["one rank", "pp2 vpp2", "ep2", "tp2"]))
@pytest.mark.parametrize(
    "graph",
    chosen(
        ["eager", "whole", "updating", "layer", "partial"],
        ["eager", "whole", "updating", "partial"],
    ),
)
def test_checks_change_nothing_and_find_nothing(layout: str, graph: str):
    kinds = {"eager": EAGER, "whole": WHOLE, "updating": UPDATING}
    model = "static" if layout in ("ep2", "tp2") else "moe"
    run = run_of(LAYOUTS[layout], kinds.get(graph) or local(graph), model)
    assert all(run_distributed(with_and_without, run.world_size, run))


def flip(tensor: Tensor) -> None:
    """Flip a low bit in the middle of a tensor."""
    words = tensor.detach().view(-1).view(torch.int32)
    words[len(words) // 2] ^= 1 << 12


class Fault:
    """Flips a bit on one rank: at its n-th occasion, or at each one with `always`."""

    def __init__(self, nth: int, always: bool = False) -> None:
        self.nth, self.always, self.seen = nth, always, 0

    def strike(self, tensor: Tensor) -> None:
        self.seen += 1
        if self.always or self.seen == self.nth:
            flip(tensor)


def in_forward(engine: Engine, fault: Fault) -> None:
    """Have the outputs of one layer's first phase struck."""
    change_first_phase(engine, lambda x: fault.strike(x))


def in_backward(engine: Engine, fault: Fault) -> None:
    """Have gradients of one layer's first outputs struck."""

    def struck(grad: Tensor) -> Tensor:
        changed = grad.clone()
        fault.strike(changed)
        return changed

    change_first_phase(engine, lambda x: x.register_hook(struck) if x.requires_grad else None)


def change_first_phase(engine: Engine, change: Callable[[Tensor], object]) -> None:
    layer = engine.chunks[0].in_order[0]
    first = layer.phases[0]

    def run(*inputs: object) -> tuple[object, ...]:
        outputs = first.run(*inputs)
        change(next(x for x in outputs if isinstance(x, Tensor)))
        return outputs

    layer.phases = (dataclasses.replace(first, run=run), *layer.phases[1:])


class Wire(TorchDispatchMode):
    """Strikes what a rank gathers."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        if func._schema.name == "c10d::_allgather_base_":
            torch.distributed.Work.unbox(done[1]).wait()
            self.fault.strike(args[0])
        return done


@contextmanager
def striking_arrivals(fault: Fault) -> Iterator[None]:
    """Strike what arrives from other stages."""
    wait = Transport.wait

    def struck(self: TracedTransport, ops: Sequence[P2POp]) -> None:
        wait(self, ops)
        for op in ops:
            if not op.send:
                fault.strike(self.arriving[op])

    with patch.object(Transport, "wait", struck):
        yield


def found_by(rank: int, run: Run, faulty: int, where: str, always: bool) -> tuple[Any, Any] | None:
    """Train two steps, then strike one rank in the check after the second."""
    torch.manual_seed(rank)
    engine = engine_of(run, rank)
    step = TrainingStep(engine)
    check = IntegrityCheck(step, 2)
    here = rank == faulty
    fault = Fault(2, always)
    for n in range(2):
        batches = batches_of(run, n, engine.groups.dp_rank)
        step(batches, run.optim.lr, run.optim.weight_decay)
    engine.gather_all_params()
    if here and where in ("forward", "backward"):
        (in_forward if where == "forward" else in_backward)(engine, fault)
    if here and where == "weight":
        flip(engine.optimizer.shards[0][0].params)
    if here and where == "main":
        engine.optimizer.shards[0][0].main[0] += 1
    wires = {"gathered": Wire, "arriving": striking_arrivals}
    with wires[where](fault) if here and where in wires else nullcontext():
        found = check.after(2, batches)
    return None if found is None else (found.ranks, found.text)


FAULTS = {
    "forward": (ParallelConfig(), 0, "forward", False, (0,), "computed"),
    "forward, tp": (ParallelConfig(tp=2), 1, "forward", False, (1,), "sent"),
    "forward, pp": (ParallelConfig(pp=2), 0, "forward", False, (0,), "sent"),
    "forward, ep": (ParallelConfig(dp=2, ep=2), 1, "forward", False, (1,), "sent"),
    "backward, pp": (ParallelConfig(pp=2), 1, "backward", False, (1,), "sent"),
    "backward, dp": (ParallelConfig(dp=2), 1, "backward", False, (1,), "computed"),
    "message, tp": (ParallelConfig(tp=2), 1, "gathered", False, (1,), "sent"),
    "message, pp": (ParallelConfig(pp=2), 1, "arriving", False, (1,), "received"),
    "always, of two": (ParallelConfig(dp=2), 1, "forward", True, (0, 1), "computed"),
    "always, of three": (ParallelConfig(dp=3), 1, "forward", True, (1,), "computed"),
    "always, tp": (ParallelConfig(dp=3, tp=2), 3, "forward", True, (3,), "sent"),
    "weight, of two": (ParallelConfig(dp=2), 1, "weight", False, (0, 1), "holds"),
    "weight, of three": (ParallelConfig(dp=3), 2, "weight", False, (2,), "holds"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_flipped_bit_is_found_and_its_rank_named(case: str):
    parallel, faulty, where, always, ranks, word = FAULTS[case]
    train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=4 * (parallel.dp or 1))
    run = run_of(parallel, model="moe" if parallel.ep > 1 else "dense", train=train)
    found = run_distributed(found_by, run.world_size, run, faulty, where, always)
    assert len(set(found)) == 1 and found[0] is not None, found
    assert found[0][0] == ranks and word in found[0][1], found[0]
