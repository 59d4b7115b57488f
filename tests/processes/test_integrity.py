"""Replays find flipped bits and name their rank, and change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.choices import DispatcherKind
from app.config import CudaGraphConfig, ParallelConfig, Run, TrainConfig
from app.engine.files.attempt import Attempt
from app.engine.files.run_folder import FolderLock, read_metrics
from app.engine.integrity.bits import bits_of
from app.engine.integrity.check import IntegrityCheck
from app.engine.integrity.trace import TracedTransport
from app.engine.ranks.agreement import rank_zero_says
from app.engine.ranks.groups import create_groups
from app.engine.report.metrics import Stopwatch
from app.engine.run.trainer import Trainer
from app.engine.start.start import find_start, load_all_data
from app.engine.step.engine import Engine
from app.engine.step.executor import Transport
from app.engine.step.records import StepReport
from app.engine.step.step import TrainingStep
from app.errors import CORRUPTED, ConfigError, Corrupted
from app.plan.actions import P2POp
from app.plan.partners import repeaters
from app.planner.plan import Plan
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes.captured import EAGER, FOUR, LAYOUTS, MODELS, UPDATING, WHOLE, local
from tests.runs import batches_of, engine_of, make_run, whole_parameters
from tests.training import composed, corpus_in, losses

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


@pytest.mark.parametrize("layout", chosen(LAYOUTS, ["dp2", "pp2 vpp2", "ep2", "tp2"]))
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
        if func._schema.name == "c10d::allgather_into_tensor_coalesced_":
            torch.distributed.Work.unbox(done).wait()
            self.fault.strike(args[0][0])
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


def train_struck(rank: int, run: Run, after: int, always: bool) -> tuple[str, int, int]:
    """How a run ends; rank 1 flips a bit of its weights after a step, once or always."""
    plan = Plan(run)
    groups = create_groups(plan.layout, rank)
    start = rank_zero_says(groups, lambda: find_start(run))
    data = load_all_data(run, groups, rank)
    training = Trainer(engine_of(run, rank), data, start)
    take, guard = training.step, training.corruption

    def struck(stopwatch: Stopwatch) -> StepReport:
        report = take(stopwatch)
        if rank == 1 and report.step == after and guard and (always or not guard.rollbacks):
            training.engine.gather_all_params()
            flip(training.engine.optimizer.shards[0][0].params)
        return report

    training.step = struck
    try:
        with FolderLock() as lock:
            training.fit(Attempt(), lock)
    except Corrupted as end:
        return str(end), end.code, guard.rollbacks if guard else 0
    return "", 0, guard.rollbacks if guard else 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return corpus_in(tmp_path_factory.mktemp("corpus"))


def struck_run(
    corpus: tuple[str, ...], folder: Path, *overrides: str, after: int = 5, always: bool = False
) -> tuple[str, int, int]:
    settings = ("parallel.dp=2", "train.steps=8", "checkpoint.interval=3", f"run_dir={folder}")
    run = composed((*corpus, *settings, *overrides), 2)
    ends = run_distributed(train_struck, 2, run, after, always)
    assert len(set(ends)) == 1, ends
    return ends[0]


def test_a_run_rewinds_and_ends_as_without_the_fault(corpus: tuple[str, ...], tmp_path: Path):
    """Also the step before a checkpoint is checked, so that it is not saved."""
    guarded = ("train.replay_every=4", "train.on_corruption=rollback")
    assert struck_run(corpus, tmp_path / "a") == ("", 0, 0)
    assert struck_run(corpus, tmp_path / "b", *guarded, after=6) == ("", 0, 1)
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    back = [row for row in read_metrics(tmp_path / "b") if "rollback_from" in row]
    assert [(row["step"], row["rollback_from"]) for row in back] == [(3, 6)]


@pytest.mark.parametrize(
    "policy, said",
    [
        ("stop", "(train.on_corruption=stop)"),
        ("rollback", "as before the last rollback"),
    ],
)
def test_a_run_ends_with_the_rank_and_what_is_saved(
    corpus: tuple[str, ...], tmp_path: Path, policy: str, said: str
):
    guarded = ("train.replay_every=1", f"train.on_corruption={policy}")
    end, code, rollbacks = struck_run(corpus, tmp_path / "a", *guarded, always=True)
    assert end.startswith("step 5: one of rank 0 (") and said in end, end
    assert "holds wrong bits: its weights" in end and "step-00000003" in end, end
    assert (code, rollbacks) == (CORRUPTED, int(policy == "rollback"))


def test_sums_see_every_bit_and_places():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.bool):
        for count in (0, 1, 3, 1021, 5000):
            values = torch.arange(count).to(torch.float32).add(1).to(dtype)
            assert bits_of(values) == bits_of(values.clone())
            raw = values.clone().view(torch.uint8)
            for place in {0, len(raw) // 2, len(raw) - 1} if count else ():
                for bit in range(8):
                    raw[place] ^= 1 << bit
                    assert bits_of(raw.view(dtype)) != bits_of(values), (dtype, count, place, bit)
                    raw[place] ^= 1 << bit
    swapped = torch.tensor([2.0, 1.0, 3.0])
    assert bits_of(swapped) != bits_of(torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    "override, said",
    [
        ("train.deterministic=false", "compares bits"),
        ("train.on_corruption=rollback checkpoint.interval=0", "goes back to checkpoints"),
    ],
)
def test_what_cannot_be_compared_is_refused(override: str, said: str):
    with pytest.raises(ConfigError, match=said):
        composed(("+experiment=smoke", "train.replay_every=5", *override.split()), 1)


def test_who_repeats_whose_microbatches():
    def of(world: int, **degrees: Any) -> tuple[int, ...] | None:
        run = run_of(ParallelConfig(world_size=world, **degrees))
        return repeaters(run, Plan(run).layout)

    assert of(1) is None and of(2, tp=2) is None and of(2, ep=2) is None
    assert of(4) == (1, 2, 3, 0)
    assert of(4, tp=2) == (2, 3, 0, 1)
    assert of(4, pp=2) == (1, 0, 3, 2)
    assert of(4, ep=2) == (2, 3, 0, 1)
    assert of(8, tp=2, ep=2) in ((4, 5, 6, 7, 0, 1, 2, 3), (2, 3, 4, 5, 6, 7, 0, 1))
