"""Training with clones of hot experts: like without them, captured like eager, and with weights and
gradients where they belong.

Shapes: R ranks with L experts and s slots each, S = R·s, T tokens of a rank, K experts of each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.choices import CloneAlgorithm, DispatcherKind, Score, StaticCapacity
from app.config import MoEConfig, ParallelConfig, Run, TrainConfig
from app.config.experts import EchoConfig, StaticConfig
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.files.checkpoints import read_manifest
from app.engine.report.metrics import Meter
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep
from app.model.layers.weight_grads import MainGradSink, WeightGrad
from app.moe.clones import cloning
from app.moe.clones.cloning import Cloning
from app.moe.clones.record import Clones
from app.moe.clones.transport import CollectiveClones
from app.moe.dispatch.cloning import CloningDispatcher
from app.moe.dispatch.static import StaticDispatcher
from app.moe.dispatch.transport import CollectiveTransport
from app.moe.echo import ClonePlan, plan_clones
from app.moe.experts import Experts
from app.plan.model.experts import ExpertWeights
from app.plan.parts.static import PlannedStatic
from app.rules import check
from tests.cases import chosen
from tests.checkpoints import save_checkpoint
from tests.distributed import run_distributed
from tests.echo_plans import draw_counts, loads_after
from tests.parity import exactly, here
from tests.processes.captured import CHOICES, EAGER, FULL_ITERATIONS, same, several
from tests.processes.static import (
    FACTOR,
    GRAPHS,
    LAYOUTS,
    NEVER,
    WHOLE,
    run_of,
    short_run,
    steps_of,
    with_static,
)
from tests.rounding import expect_alike, in_fp64
from tests.runs import batches_of, engine_of, make_run, whole_gradients, whole_parameters

CLONED = EchoConfig(spares=1, threshold=0.0, check=True)
TRAINED = [name for name in LAYOUTS if "etp" not in name]


def first_step(engine: Engine, favour: int = 0) -> dict[str, Any]:
    """Gradients and numbers of the first step; `favour`: of experts that routers prefer."""
    run = engine.plan.run
    for _, router in engine.routers():
        router.weight.data[:favour] += 0.3
    report, _ = TrainingStep(engine)(batches_of(run, 0, engine.groups.dp_rank), 1e-3, 0.1)
    values = {name: grad.numpy() for name, grad in whole_gradients(engine).items()}
    load = report.moe_rank_load_before, report.moe_rank_load_after, report.moe_clones
    return {"values": values | {"loss": report.loss}, "load": load}


FAVOURS = functools.partial(first_step, favour=2)


def expect_like_without(plain: Run, echo: EchoConfig) -> list[dict[str, Any]]:
    """Gradients with clones are as near to fp64 as without; returns what was found with them."""
    moe = dataclasses.replace(plain.model.moe, echo=echo)
    cloned = check(dataclasses.replace(plain, model=dataclasses.replace(plain.model, moe=moe)))
    world = plain.world_size
    without, exact = (run_distributed(each, world, plain, FAVOURS)[0] for each in (here, exactly))
    assert without["load"] == (None, None, None)
    results = run_distributed(here, world, cloned, FAVOURS)
    for found in results:
        expect_alike(found["values"], without["values"], exact["values"], plain.parallel)
    return results


@pytest.mark.every(5)
@pytest.mark.parametrize("algorithm", CloneAlgorithm, ids=lambda each: each.value)
@pytest.mark.parametrize("layout", chosen([*TRAINED], ["ep4", "pp2 ep2"]))
def test_gradients_are_those_without_clones(layout: str, algorithm: CloneAlgorithm):
    echo = dataclasses.replace(CLONED, algorithm=algorithm)
    for found in expect_like_without(run_of(layout), echo):
        before, after, clones = found["load"]
        assert after < before
        assert clones > 0


@pytest.mark.full
@pytest.mark.parametrize("spares", [1, 3, 7])
def test_eight_ranks_and_several_slots(spares: int):
    run = make_run(
        with_static(),
        parallel=ParallelConfig(ep=8, dp=8),
        train=TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=16),
    )
    expect_like_without(run, dataclasses.replace(CLONED, spares=spares))


@pytest.mark.full
@pytest.mark.parametrize("layout", TRAINED)
def test_captured_like_eager(layout: str):
    names = GRAPHS.get(layout, WHOLE)
    runs = {name: run_of(layout, CHOICES[name], echo=CLONED) for name in names}
    runs["eager"] = run_of(layout, echo=CLONED)
    for results in run_distributed(several, runs["eager"].world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
            assert result["facts"].count == (1 if name in FULL_ITERATIONS else result["planned"]), (
                name
            )


@pytest.mark.full
@pytest.mark.parametrize("layout", chosen(["ep2", "zero bubble ep2"], ["ep2"]))
@pytest.mark.parametrize(
    "options",
    chosen(
        [
            {"static": StaticConfig(paged_buffer=1.1)},
            {"shared_overlap": True},
            {"capacity_factor": 1.0},
        ],
        [{"static": StaticConfig(paged_buffer=1.1)}],
    ),
    ids=["buffer", "overlap", "capacity"],
)
def test_with_what_else_an_moe_layer_may_have(layout: str, options: dict[str, Any]):
    runs = {"full iteration": run_of(layout, CHOICES["full iteration"], echo=CLONED, **options)}
    runs["eager"] = run_of(layout, echo=CLONED, **options)
    for results in run_distributed(several, runs["eager"].world_size, runs):
        assert same(results["full iteration"], results["eager"])


def with_clones(run: Run) -> Run:
    moe = dataclasses.replace(run.model.moe, echo=CLONED)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, moe=moe))


@pytest.mark.full
def test_clones_need_less_activation_memory():
    """1.1 times the mean is too little without them, and enough with them, validation included."""
    short = short_run(CHOICES["full iteration"], StaticCapacity.factor)
    worst = short_run(EAGER, StaticCapacity.worst)
    without = run_distributed(steps_of, 2, short, NEVER)[0]
    found, exact = (run_distributed(steps_of, 2, with_clones(r), NEVER)[0] for r in (short, worst))
    assert sum(without["again"]) > 0 == sum(found["again"])
    assert found["seen"] == exact["seen"] and found["validated"] == exact["validated"]


@pytest.mark.full
def test_rerun_steps_have_the_same_clones():
    """One slot takes a quarter of all tokens from the rank whose four experts get all."""
    runs = []
    for graph, capacity in ((EAGER, StaticCapacity.worst), (CHOICES["full iteration"], FACTOR)):
        run = with_clones(short_run(graph, capacity))
        moe = dataclasses.replace(run.model.moe, score=Score.sigmoid, bias_update_rate=1e-3)
        runs.append(dataclasses.replace(run, model=dataclasses.replace(run.model, moe=moe)))
    worst, found = (run_distributed(steps_of, 2, run, NEVER, 4) for run in runs)
    for ours, exact in zip(found, worst, strict=True):
        assert ours["again"] == [1] * len(ours["again"])
        assert ours["seen"] == exact["seen"] and ours["validated"] == exact["validated"]


# one layer of experts by itself
E, K, T, D, F = 8, 3, 96, 16, 24


@dataclasses.dataclass
class Sums:
    """Gradients of weights, added up in fp32."""

    total: dict[nn.Parameter, Tensor] = dataclasses.field(default_factory=dict)

    def add(self, weight: nn.Parameter, gradient: WeightGrad) -> None:
        zeros = torch.zeros(weight.shape, dtype=torch.float32)
        gradient.add_to(self.total.setdefault(weight, zeros))


def layer_of(rank: int, spares: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tokens through this rank's experts, most of them to two of the first rank, and back."""
    group = dist.new_group()
    ranks = group.size()
    moe = MoEConfig(
        num_experts=E,
        top_k=K,
        ffn_hidden_size=F,
        dispatcher=DispatcherKind.static,
        echo=EchoConfig(spares=spares, check=spares > 0),
    )
    planned = PlannedStatic(moe, ep=ranks, etp=1)
    cloned = None
    if spares:
        shapes = [torch.Size((D, 2 * F)), torch.Size((F, D))]
        device = torch.device("cpu")
        transport = CollectiveClones(group, planned.own, spares, shapes=shapes, device=device)
        cloned = Cloning(moe.echo, transport, rank=rank, ranks=dist.get_world_size(), device=device)
    collective = CollectiveTransport(group, planned.experts)
    static = StaticDispatcher(planned, collective, None, ep_rank=rank, device=torch.device("cpu"))
    dispatcher: Any = static if cloned is None else CloningDispatcher(static, cloned)
    experts = Experts(ExpertWeights.of(D, F, planned.own))
    whole = torch.Generator().manual_seed(0)
    for weight in experts.parameters():
        drawn = torch.randn(E, *weight.shape[1:], generator=whole).mul(0.3).bfloat16()
        own = drawn[rank * planned.own : (rank + 1) * planned.own]
        weight.data = own.to(dtype)
    mine = torch.Generator().manual_seed(rank + 1)
    popular = torch.tensor([8.0, 8.0, 1, 1, 1, 1, 1, 1])
    experts_TK = popular.expand(T, E).multinomial(K, generator=mine).sort(dim=1).values
    x_TD, grad_TD = (torch.randn(T, D, generator=mine).bfloat16().to(dtype) for _ in range(2))
    probs_TK = torch.rand(T, K, generator=mine).requires_grad_()
    x_TD.requires_grad_()
    sums = Sums()
    dispatched, origin = dispatcher.dispatch(x_TD, dispatcher.preprocess(experts_TK))
    rows_RD = experts.forward(dispatched, MainGradSink(sums.add))
    y_TD = dispatcher.combine(rows_RD, probs_TK.to(dtype), origin)
    y_TD.backward(grad_TD)
    assert x_TD.grad is not None and probs_TK.grad is not None
    up, down = (sums.total[weight] for weight in experts.parameters())
    found = {"y": y_TD.detach(), "x": x_TD.grad, "probs": probs_TK.grad, "up": up, "down": down}
    return {name: value.double().numpy() for name, value in found.items()}


def exact_layer(rank: int) -> dict[str, Tensor]:
    with in_fp64():
        return layer_of(rank, 0, torch.float64)


@pytest.mark.full
def test_in_bf16_gradients_are_as_near_to_fp64_as_without():
    """The RMS error over all ranks with clones is at most 1.1 times that without.

    Gradients that clones return in fp32 are rounded less, since the GEMM adds them in parts.
    """
    exact = run_distributed(exact_layer, 4)
    errors: dict[int, dict[str, float]] = {}
    for spares in (0, 2):
        found = run_distributed(layer_of, 4, spares, torch.bfloat16)
        errors[spares] = {
            name: math.sqrt(
                sum(
                    ((ours[name] - wanted[name]) ** 2).mean()
                    for ours, wanted in zip(found, exact, strict=True)
                )
            )
            for name in exact[0]
        }
    for name, error in errors[0].items():
        assert errors[2][name] <= 1.1 * error, (name, errors)


def exchanged(rank: int, ranks: int, spares: int) -> int:
    """Matrices that tell where they come from; gradients that tell the order of their sum. Returns
    how often they do.
    """
    local = 2
    shapes = [torch.Size((4, 8)), torch.Size((8, 4))]
    group = dist.new_group()
    transport = CollectiveClones(group, local, spares, shapes=shapes, device=torch.device("cpu"))
    counts_E = torch.arange(ranks * local) + 100 * rank
    counts_RE = transport.gather_counts(torch.stack((counts_E - 7, torch.full_like(counts_E, 7))))
    assert (counts_RE == torch.arange(ranks * local) + 100 * torch.arange(ranks)[:, None]).all()
    generator = torch.Generator().manual_seed(1)
    slots, told_apart = ranks * spares, 0
    for turn in range(6):
        expert_S = torch.randint(0, ranks * local, (slots,), generator=generator)
        filled_S = torch.rand(slots, generator=generator) < 0.7
        clones = Clones(expert_S, 7 * filled_S.long())
        mine = range(rank * spares, (rank + 1) * spares)
        ids_L11 = torch.arange(rank * local, (rank + 1) * local)[:, None, None]
        weights = [ids_L11.expand(-1, *shape) + 0.5 * turn for shape in shapes]
        for kind, shape in enumerate(shapes):
            came = transport.send(kind, weights, clones)
            for nth, slot in enumerate(mine):
                if filled_S[slot]:
                    assert (came[nth] == expert_S[slot] + 0.5 * turn).all()
            terms_SIO = torch.randn(slots, *shape, generator=generator)
            transport.grads(kind, clones).copy_(terms_SIO[mine.start : mine.stop])
            total = torch.randn(local, *shape, generator=generator)
            wanted, backward = total.clone(), total.clone()
            transport.return_grads(kind, total, clones)
            order = [s for s in range(slots) if filled_S[s] and expert_S[s] // local == rank]
            for slot, last in zip(order, reversed(order), strict=True):
                wanted[expert_S[slot] % local] += terms_SIO[slot]
                backward[expert_S[last] % local] += terms_SIO[last]
            assert torch.equal(total, wanted)
            told_apart += not torch.equal(wanted, backward)
    return told_apart


@pytest.mark.every(2)
@pytest.mark.parametrize(("ranks", "spares"), [(2, 1), (4, 2), (3, 3), (8, 1)])
def test_clone_weights_leave_and_gradients_return(ranks: int, spares: int):
    assert sum(run_distributed(exchanged, ranks, ranks, spares)) or ranks * spares < 4


class Alone:
    """The transport of one rank that knows the counts of all."""

    def __init__(self, counts_RE: Tensor) -> None:
        self.counts_RE = counts_RE

    def gather_counts(self, counts_CE: Tensor) -> Tensor:
        """Return the counts that it was given."""
        return self.counts_RE


@pytest.mark.parametrize("algorithm", CloneAlgorithm, ids=lambda each: each.value)
def test_a_plan_is_made_as_configured(algorithm: CloneAlgorithm):
    """For these counts each algorithm has another plan, and so has each threshold."""
    counts_RE = draw_counts(4, 3, 400, seed=0)
    experts_TK = torch.arange(12).repeat_interleave(counts_RE[0])[:, None]
    found = {}
    for threshold in (0.0, 0.4):
        echo = EchoConfig(spares=1, algorithm=algorithm, threshold=threshold)
        planner = Cloning(echo, Alone(counts_RE), rank=0, ranks=1, device=torch.device("cpu"))
        _, clones = planner.plan(experts_TK, 12)
        moved_ES, _ = plan_clones(counts_RE, 1, algorithm, threshold)
        assert torch.equal(clones.moved_S, moved_ES.sum(dim=0))
        assert torch.equal(planner.sums_4[1], loads_after(counts_RE, moved_ES).max())
        found[threshold] = clones.moved_S.tolist()
        others = [plan_clones(counts_RE, 1, a)[0].sum(0) for a in CloneAlgorithm if a != algorithm]
        assert threshold or all((each != clones.moved_S).any() for each in others)
    assert found[0.0] != found[0.4] or algorithm is CloneAlgorithm.target_search
    planner.start_step()
    assert planner.sums_4.tolist() == [0, 0, 0, 0]


def reports(rank: int, run: Run) -> list[dict[str, Any]]:
    """Return the loads reported by two steps, and those computed by hand from routing."""
    engine = engine_of(run, rank)
    for _, router in engine.routers():
        router.weight.data[:2] += 0.3
    step, meter, found = TrainingStep(engine), Meter(engine, first_step=1), []
    for n in range(2):
        report, totals = step(batches_of(run, n, engine.groups.dp_rank), 1e-3, 0.1)
        counts_LE = torch.stack(list(totals.counts.values()))
        dist.all_reduce(counts_LE)
        load_LR = counts_LE.view(len(counts_LE), 2, -1).sum(dim=2)
        meter.count(totals)
        report.step, report.step_ms = n + 1, 1e3
        meter.complete(report)
        wanted = 2 * load_LR.max(dim=1).values.sum() / load_LR.sum()
        found.append(report.metrics() | {"wanted": float(wanted)})
    return found


def test_loads_are_reported_step_by_step():
    """One microbatch and one group of ranks, so that a layer's counts are those of a plan."""
    train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=4)
    run = make_run(with_static(echo=CLONED), parallel=ParallelConfig(ep=2, dp=2), train=train)
    for found in run_distributed(reports, 2, run):
        for report in found:
            assert report["moe_rank_load_before"] == pytest.approx(report["wanted"], rel=1e-6)
            assert 1 <= report["moe_rank_load_after"] < report["wanted"]
            assert report["moe_clones"] == 3  # a slot of the other rank in each of the layers


def wrong_reroute(rank: int, run: Run, how: str) -> str:
    right = cloning.follow_plan

    def wrong(experts_TK: Tensor, plan: ClonePlan, rank: int, counts_CE: Tensor) -> Tensor:
        found = right(experts_TK, plan, rank, counts_CE).clone()
        ids = counts_CE.shape[1] + len(plan.moved_S)
        found[0, 0] = {"lost": ids, "twice": found[0, 1], "elsewhere": (found[0, 0] + 1) % 4}[how]
        return found

    cloning.follow_plan = wrong
    try:
        first_step(engine_of(run, rank))
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("lost", "a token lost or gained an expert"),
        ("twice", "a token goes to the same place twice"),
        (
            "elsewhere",
            "a token goes to another expert than it chose|other tokens than planned|twice",
        ),
    ],
)
def test_tokens_that_go_astray_are_noticed(how: str, said: str):
    for line in run_distributed(wrong_reroute, 2, run_of("ep2", echo=CLONED), how):
        assert re.search(rf"model\.moe\.echo\.check: .*({said})", line), line


def saved_and_loaded(rank: int, runs: dict[str, Run], folder: Path) -> dict[str, Any]:
    """Parameters after a step, saved with clones, and of engines that load them."""
    run = runs["saved"]
    engine = engine_of(run, rank)
    TrainingStep(engine)(batches_of(run, 0, engine.groups.dp_rank), 1e-3, 0.1)
    progress = Progress(step=1, updates=1, tokens=512)
    path = save_checkpoint(folder, engine, run, progress, cursor={"sequences": 0})
    parameters = {"saved": whole_parameters(engine)}
    for name in ("with", "without"):
        other = engine_of(runs[name], rank)
        load_checkpoint(path, read_manifest(path), other)
        other.gather_all_params()
        parameters[name] = whole_parameters(other)
    return {each: {n: v.numpy() for n, v in found.items()} for each, found in parameters.items()}


def test_checkpoints_hold_no_clones(tmp_path: Path):
    """They load with clones and without, and are as large as without."""
    saved = run_of("ep2", echo=CLONED)
    more = dataclasses.replace(CLONED, spares=2)
    runs = {"saved": saved, "without": run_of("ep2"), "with": run_of("ep2", echo=more)}
    for found in run_distributed(saved_and_loaded, 2, runs, tmp_path):
        assert found["saved"].keys() == found["with"].keys() == found["without"].keys()
        for name, value in found["saved"].items():
            assert (found["with"][name] == value).all() and (found["without"][name] == value).all()
