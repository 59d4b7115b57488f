"""The sharded AdamW against torch's on one process: values, clipping, skipped updates, fp32 main
parameters, memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.choices import Dtype
from app.collectives import all_reduce
from app.config import OptimConfig, ParallelConfig, PrecisionConfig
from app.engine.ranks.dtypes import DTYPES
from app.engine.ranks.groups import Groups, create_groups
from app.kernels.adamw import update_rates
from app.model.layers.linear import named_parameters
from app.optim.buffers import ParamSpec
from app.optim.distributed import DistributedOptimizer, OptimizerGroups
from app.plan.layout import ParallelLayout
from app.plan.sharding.parameters import ALIGN, ChunkBuffers, Parameter, chunk_buffers
from app.plan.sharding.reshard import Block
from app.plan.shards import buffer_layout
from tests.cases import sampled
from tests.distributed import run_distributed
from tests.oracle import oracle
from tests.rounding import expect_alike, expect_sums, numbered
from tests.runs import TINY, engine_of, make_run

# name -> shape of the whole parameter, in two chunks; odd sizes put borders of shards inside of
# parameters
DENSE = (
    {"a": (7, 13), "norm.weight": (33,), "b": (50, 11)},
    {"one": (1,), "c": (3, 64, 2), "bias": (130,)},
)
EXPERTS = ({"w_up": (4, 5, 9)}, {"w_down": (4, 30, 3)})
NAMES = [(name, shape) for part in (*DENSE, *EXPERTS) for name, shape in part.items()]
MICROBATCHES = 2
BAD_STEP, BAD_RANK = 2, 1


@dataclass(frozen=True)
class Case:
    """One training of the parameters above with random gradients."""

    world: int = 1
    ep: int = 1
    dtype: torch.dtype = torch.float32
    clip: float = 1.0
    steps: int = 6
    bad: float | None = None  # a gradient element of rank BAD_RANK % world at step BAD_STEP
    bucket: int | None = None  # elements after which a bucket is closed
    overlap: bool = True

    @property
    def config(self) -> OptimConfig:
        overlap = {"overlap_grads": self.overlap, "overlap_params": self.overlap}
        return OptimConfig(
            clip_norm=self.clip, weight_decay=0.3, bucket_numel=self.bucket, **overlap
        )

    def layout(self) -> ParallelLayout:
        return ParallelLayout(self.world, ep=self.ep, etp=1)

    def lr(self, step: int) -> float:
        return 1e-2 * (1 + step % 3)

    def scale(self, step: int) -> float:
        """Return the factor on the gradients of a step.

        Adam is invariant to a factor common to all steps, so only some are large enough to clip.
        """
        return (1.0, 0.001, 0.03)[step % 3]


def normal(seed: object, shape: tuple[int, ...]) -> Tensor:
    """Values that depend on the seed's text only; one in a hundred is tiny, so that eps counts."""
    random = torch.Generator().manual_seed(int.from_bytes(str(seed).encode()[-7:], "big"))
    values = torch.randn(shape, generator=random)
    return torch.where(torch.rand(shape, generator=random) < 0.01, values * 1e-6, values)


def first_values(case: Case) -> dict[str, Tensor]:
    """The whole initial parameters, in the parameters' type."""
    return {name: normal(f"{name}.0", shape).to(case.dtype) for name, shape in NAMES}


def grads(case: Case, step: int, rank: int, mb: int) -> dict[str, Tensor]:
    """Whole gradients of one microbatch on one rank, in the parameters' type; zero for experts
    of other ranks.
    """
    ep_rank, found = case.layout().coords(rank, expert=True)["ep"], {}
    for name, shape in NAMES:
        grad = normal(f"{name}{step}.{rank}.{mb}", shape) * case.scale(step)
        if name in EXPERTS[0] | EXPERTS[1] and case.ep > 1:
            mine = torch.arange(shape[0]) // (shape[0] // case.ep) == ep_rank
            grad *= mine.view(-1, *[1] * (len(shape) - 1))
        found[name] = grad.to(case.dtype)
    if case.bad is not None and (step, rank, mb) == (BAD_STEP, BAD_RANK % case.world, 0):
        found["b"][3, 4] = case.bad
    return found


def make_specs(case: Case, chunk: int, ep_rank: int) -> Iterator[ParamSpec]:
    whole = first_values(case)
    for name in DENSE[chunk]:
        block = Block.whole(*whole[name].shape)
        yield ParamSpec(
            name, nn.Parameter(whole[name].clone()), False, decay=whole[name].dim() > 1, block=block
        )
    for name in EXPERTS[chunk]:
        block = Block.whole(*whole[name].shape).cut(0, case.ep, ep_rank)
        yield ParamSpec(
            name,
            nn.Parameter(whole[name].chunk(case.ep)[ep_rank].clone()),
            True,
            decay=True,
            block=block,
        )


def offset(spec: ParamSpec) -> int:
    """First element of this rank's part of the flattened parameter, whose first dimension alone
    is cut.
    """
    return spec.block.start[0] * math.prod(spec.block.shape[1:])


def backward(case: Case, specs: list[ParamSpec], whole: dict[str, Tensor]) -> None:
    """Accumulate the parts of `whole` gradients that belong to the parameters of this rank."""
    parts = [
        whole[spec.name].flatten()[offset(spec) :][: spec.param.numel()].view_as(spec.param)
        for spec in specs
    ]
    sum(
        (spec.param * part).sum(dtype=torch.float32)
        for spec, part in zip(specs, parts, strict=True)
    ).backward()


def rates(lr: float, weight_decay: float) -> Tensor:
    return update_rates(lr, weight_decay, torch.device("cpu"))


def states_of(optimizer: DistributedOptimizer) -> list[Tensor]:
    """Copies of everything an update changes on this rank."""
    return [
        value.clone()
        for piece in optimizer.param_shards()
        for value in (*piece.state.values(), piece.step)
    ]


def one_step(
    case: Case,
    step: int,
    groups: Groups,
    optimizer: DistributedOptimizer,
    specs: list[list[ParamSpec]],
) -> tuple[float, float]:
    """(gradient norm before clipping, 1.0 where the update was skipped)."""
    optimizer.zero_grad()
    for mb in range(MICROBATCHES):
        for index, chunk in enumerate(specs):
            optimizer.expect_grads(index, last=mb == MICROBATCHES - 1)
            backward(case, chunk, grads(case, step, groups.rank, mb=mb))
    for chunk in range(2):
        optimizer.reduce_grads(chunk)
    optimizer.finish_grads()
    norm_sq = optimizer.local_norm_sq()
    all_reduce(norm_sq, groups.world)
    return norm_sq.sqrt().item(), optimizer.step(
        rates(case.lr(step), case.config.weight_decay), norm_sq.sqrt()
    ).item()


def buffers_of(
    chunks: list[list[ParamSpec]], groups: Groups, config: OptimConfig
) -> list[ChunkBuffers]:
    """Return the buffer layout of every chunk's parameters."""
    listed = [
        [Parameter(s.name, tuple(s.param.shape), s.expert) for s in specs] for specs in chunks
    ]
    return [chunk_buffers(parameters, groups.layout, config) for parameters in listed]


def optimizer_of(
    chunks: list[list[ParamSpec]],
    groups: Groups,
    config: OptimConfig,
    grads: torch.dtype = torch.float32,
) -> DistributedOptimizer:
    shared_by = OptimizerGroups(
        dp_cp=groups.dp_cp, edp=groups.edp, tp=groups.tp, embedding=groups.embedding
    )
    buffers, device = buffers_of(chunks, groups, config), torch.device("cpu")
    return DistributedOptimizer(
        chunks, buffers, config, groups=shared_by, grads=grads, device=device
    )


def train(rank: int, case: Case) -> dict[str, Any]:
    """Parameters of this rank by name, its pieces of the fp32 ones, and what every step said."""
    groups = create_groups(case.layout(), rank)
    specs = [list(make_specs(case, chunk, groups.coords.ep[0])) for chunk in range(2)]
    optimizer = optimizer_of(specs, groups, case.config)
    said, changed = [], []
    for step in range(case.steps):
        before = states_of(optimizer)
        said.append(one_step(case, step, groups, optimizer=optimizer, specs=specs))
        for chunk in range(2):
            optimizer.gather_params(chunk)
        changed.append(
            [not torch.equal(a, b) for a, b in zip(before, states_of(optimizer), strict=True)]
        )
    parameters = {
        spec.name: (offset(spec), spec.param.detach().float().numpy())
        for chunk in specs
        for spec in chunk
    }
    pieces = [
        (p.spec.name, offset(p.spec) + p.start, p.main.numpy(), p.step.item())
        for p in optimizer.param_shards()
    ]
    padding = [
        _padding(shard.buffer.params, shard.buffer.layout)
        for chunk in optimizer.shards
        for shard in chunk
    ]
    return {
        "params": parameters,
        "pieces": pieces,
        "said": said,
        "changed": changed,
        "padding": padding,
    }


def _padding(flat: Tensor, layout: Any) -> float:
    used = torch.zeros_like(flat, dtype=torch.bool)
    for start, end in layout.params:
        used[start:end] = True
    return flat[~used].abs().sum().item()


def torch_adamw(
    case: Case, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], list[float]]:
    """Train the same by torch on one process; return parameters, and norms before clipping."""
    params = {name: nn.Parameter(value.to(dtype)) for name, value in first_values(case).items()}
    kinds = [[p for p in params.values() if (p.dim() > 1) == decays] for decays in (True, False)]
    config, decays = case.config, (case.config.weight_decay, 0.0)
    options = {"betas": (config.beta1, config.beta2), "eps": config.eps, "foreach": False}
    groups = [
        {"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, decays, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, **options)
    norms = []
    for step in range(case.steps):
        parts = [
            grads(case, step, rank, mb=mb)
            for rank in range(case.world)
            for mb in range(MICROBATCHES)
        ]
        for name, param in params.items():
            param.grad = sum(part[name].to(dtype) for part in parts)
        norms.append(nn.utils.clip_grad_norm_(params.values(), case.clip or math.inf).item())
        for group in optimizer.param_groups:
            group["lr"] = case.lr(step)
        if math.isfinite(norms[-1]):
            optimizer.step()
    return {name: param.detach() for name, param in params.items()}, norms


WORLDS = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)]


def check_against_torch(case: Case) -> list[dict[str, Any]]:
    """Fp32 values of all ranks equal torch's; every element is owned exactly once; returns what
    the ranks said.
    """
    (plain, norms), (exact, exact_norms) = torch_adamw(case), torch_adamw(case, torch.float64)
    ranks = run_distributed(train, case.world, case)
    owners = {name: torch.zeros(value.numel(), dtype=torch.int64) for name, value in plain.items()}
    found = {name: torch.full((value.numel(),), math.nan) for name, value in plain.items()}
    for rank in ranks:
        for name, start, main, _ in rank["pieces"]:
            owners[name][start : start + main.size] += 1
            found[name][start : start + main.size] = torch.from_numpy(main)
        said = [norm for norm, _ in rank["said"]]
        assert [math.isfinite(norm) for norm in said] == [math.isfinite(norm) for norm in norms]
        expect_alike(
            *(numbered(filter(math.isfinite, values)) for values in (said, norms, exact_norms)),
            case=case,
        )
        assert rank["padding"] == [0.0] * len(rank["padding"])
    flat = ({name: value.flatten() for name, value in values.items()} for values in (plain, exact))
    expect_alike(found, *flat, case=case)
    assert all(count.eq(1).all() for count in owners.values())
    return ranks


MANY = [Case(*world, bucket=300) for world in WORLDS] + [
    Case(4, 2, bucket=1),
    Case(4, 2, overlap=False),
    Case(2, bucket=10**6),
]


UPDATES = [*(Case(*world) for world in WORLDS), Case(clip=0), Case(4, 2, clip=0), *MANY]


@pytest.mark.every(6)
@pytest.mark.parametrize("case", UPDATES, ids=str)
def test_updates_equal_torch_adamw(case: Case):
    ranks = check_against_torch(case)
    owned = {(name, start): main for rank in ranks for name, start, main, _ in rank["pieces"]}
    for rank in ranks:
        whole = {
            name: (offset, value.flatten()) for name, (offset, value) in rank["params"].items()
        }
        for (
            name,
            start,
        ), main in owned.items():  # after the gather every rank has the same bits whole
            offset, value = whole[name]
            if offset <= start < offset + value.size:
                assert (value[start - offset :][: main.size] == main).all(), name


def test_the_cases_clip_some_steps_and_not_others():
    clipped, norms = torch_adamw(Case())
    loose, _ = torch_adamw(Case(clip=0))
    assert min(norms) < 1 < max(norms)
    assert all(not torch.allclose(clipped[name], loose[name], atol=1e-3) for name in clipped)


@pytest.mark.every(4)
@pytest.mark.parametrize(("world", "ep"), WORLDS)
def test_bf16_parameters_round_fp32_ones(world: int, ep: int):
    for rank in check_against_torch(Case(world, ep, torch.bfloat16)):
        for name, start, main, _ in rank["pieces"]:
            offset, value = rank["params"][name]
            ours = torch.from_numpy(value).flatten()[start - offset :][: main.size]
            assert torch.equal(ours, torch.from_numpy(main).bfloat16().float())


BAD = [
    Case(1, bad=math.nan),
    Case(2, bad=math.nan),
    Case(4, 2, bad=math.nan),
    Case(4, 2, bad=math.inf),
    Case(4, 1, bad=-math.inf),
    Case(1, 1, torch.bfloat16, bad=math.nan),
    Case(4, 2, torch.bfloat16, bad=math.nan),
]


@pytest.mark.every(9)
@pytest.mark.parametrize("case", BAD, ids=str)
def test_a_bad_gradient_on_one_rank_skips_the_update_on_all(case: Case):
    for rank in check_against_torch(case):
        assert [skipped for _, skipped in rank["said"]] == [
            float(step == BAD_STEP) for step in range(case.steps)
        ]
        assert not any(rank["changed"][BAD_STEP]) and all(rank["changed"][BAD_STEP + 1])
        assert {count for *_, count in rank["pieces"]} == {case.steps - 1.0}


def one_matrix(
    rank: int, dtype: torch.dtype, gradients: list[float], lr: float
) -> tuple[list[float], float, float]:
    """A matrix of ones after one update per gradient: (value after each, fp32 value, gradient
    sum of one more step).
    """
    groups = create_groups(ParallelLayout(1), rank)
    spec = ParamSpec(
        "w", nn.Parameter(torch.ones(2, 2, dtype=dtype)), False, decay=True, block=Block.whole(2, 2)
    )
    optimizer, values = optimizer_of([[spec]], groups, OptimConfig()), []
    for gradient in gradients:
        optimizer.zero_grad()
        (spec.param * gradient).sum().backward()
        optimizer.step(rates(lr, 0.0), optimizer.local_norm_sq().sqrt())
        values.append(spec.param[0, 0].item())
    optimizer.zero_grad()
    for gradient in (1.0, *[2**-9] * 64):  # every addition alone is below the resolution of bf16
        (spec.param * gradient).sum().backward()
    (piece,) = optimizer.param_shards()
    assert dtype == torch.float32 or spec.param.grad is None
    return values, piece.main[0].item(), piece.grad[0].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_and_gradients_below_bf16_resolution_accumulate(dtype: torch.dtype):
    (found,) = run_distributed(one_matrix, 1, dtype, [1.0] * 100, 1e-4)
    values, main, gradient = found
    assert values[:2] == (
        [1.0, 1.0] if dtype == torch.bfloat16 else pytest.approx([1 - 1e-4, 1 - 2e-4], abs=1e-7)
    )
    # a hundred roundings to fp32, all in one direction
    assert main == pytest.approx(1 - 100e-4, abs=5e-6)
    assert values[-1] == torch.tensor(main).to(dtype).item()
    assert gradient == 1.125


def decay_only(rank: int, lr: float, decay: float) -> dict[str, tuple[int, bool, bool]]:
    """For every parameter of a real model: its dimensions, whether an update without gradients
    scaled it, or left it alone.
    """
    model = replace(TINY, qk_norm=True, moe=replace(TINY.moe, shared_gate=True))
    engine = engine_of(make_run(model), rank)
    before = {name: param.detach().clone() for name, param in named_parameters(engine.chunks[0])}
    engine.optimizer.zero_grad()
    engine.optimizer.step(rates(lr, decay), engine.optimizer.local_norm_sq().sqrt())
    after = dict(named_parameters(engine.chunks[0]))
    return {
        name: (
            value.dim(),
            torch.allclose(after[name], value * (1 - lr * decay), atol=0),
            torch.equal(after[name], value),
        )
        for name, value in before.items()
    }


def test_weight_decay_only_on_matrices():
    (found,) = run_distributed(decay_only, 1, 0.5, 0.2)
    vectors = {name for name, (dims, _, same) in found.items() if same}
    assert (
        vectors == {name for name, (dims, *_) in found.items() if dims == 1}
        and len(vectors) == 3 * 4 + 1
    )
    assert all(scaled for name, (_, scaled, _) in found.items() if name not in vectors)
    assert {name for name in vectors if not name.endswith("norm.weight")} == set()


def memory(rank: int, run: Any) -> list[dict[str, Any]]:
    """Per buffer: its parameters' sizes, ranks that share it, bytes of all its distinct
    storages, place of this rank's shard.
    """
    engine, found = engine_of(run, rank), []
    train_storages = {
        t.untyped_storage().data_ptr() for chunk in engine.chunks for t in chunk.parameters()
    }
    for shard in engine.optimizer.shards[0]:
        tensors = [
            shard.buffer.params,
            shard.buffer.grads,
            shard.main,
            shard.grad,
            shard.exp_avg,
            shard.exp_avg_sq,
        ]
        tensors += [
            part
            for piece in shard.param_shards
            for part in (piece.main, piece.grad, *piece.moments.values())
        ]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        train_storages -= storages.keys()
        start = shard.own_params.storage_offset()
        found.append({
            "numels": [spec.param.numel() for spec in shard.buffer.specs],
            "ranks": shard.group.size(),
            "bytes": sum(storages.values()),
            "place": (start, start + shard.own_params.numel()),
        })  # fmt: skip
    assert not train_storages, "every parameter is a view of a buffer"
    assert engine.optimizer.shards[1:] == []
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("params", list(DTYPES), ids=lambda d: d.value)
@pytest.mark.parametrize(("world", "ep"), sampled([(4, 2), (1, 1), (2, 1), (4, 1), (4, 4)], 5))
def test_memory_is_that_of_the_plan(world: int, ep: int, params: Dtype):
    run = make_run(
        parallel=ParallelConfig(world_size=world, dp=world, ep=ep),
        precision=PrecisionConfig(params),
    )
    ranks = run_distributed(memory, world, run)
    for buffers in ranks:
        # dense, then experts
        for buffer, shared_by in zip(buffers, (world, world // ep), strict=True):
            layout = buffer_layout(
                buffer["numels"], shared_by, param_align=ALIGN, shard_align=ALIGN
            )
            # parameter and gradient, then per shard two moments and, for bf16, the fp32 parameter
            whole, part = (8, 8) if params is Dtype.float32 else (6, 12)
            assert buffer["ranks"] == shared_by
            assert buffer["bytes"] == whole * layout.numel + part * layout.numel // shared_by
            assert layout.numel - sum(buffer["numels"]) < ALIGN * (
                len(buffer["numels"]) + shared_by
            )
    for index, sharers in ((0, [range(world)]), (1, [range(k, world, ep) for k in range(ep)])):
        for group in sharers:
            places = [ranks[rank][index]["place"] for rank in group]
            assert places[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(places))


GOLDEN = oracle("optim")["e2e"]


def maps(case: dict[str, Any]) -> bool:
    """Ours are AdamW without loss scaling; SGD, fp16 and its skipped steps have no counterpart."""
    adam = case["opt_class"] == ["AdamW"] and all(
        step["ok"] and step["loss_scale"] == 1 for step in case["steps"]
    )
    return adam and case["spec"]["dtype"] in ("fp32", "bf16")


def golden_loss(params: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    w0, b0, w2, b2, w3, b3, w4 = params
    hidden = nn.functional.linear(nn.functional.linear(x.to(w0.dtype), w0, b0).relu(), w2, b2)
    out = nn.functional.linear(nn.functional.layer_norm(hidden, (4,), w3, b3), w4)
    return (out.float() - y).square().mean()


def golden_run(rank: int, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Loss of this rank, gradient norm and all parameters after every step."""
    spec, world = case["spec"], case["world"]
    dtype = torch.bfloat16 if spec["dtype"] == "bf16" else torch.float32
    params = [nn.Parameter(torch.tensor(value).to(dtype)) for value in case["init"]]
    named = zip(case["param_names"], params, strict=True)
    specs = [
        ParamSpec(name, p, False, decay=p.dim() > 1, block=Block.whole(*p.shape))
        for name, p in named
    ]
    # elsewhere the groups hold copies without names
    if spec["dtype"] == "fp32" and not spec.get("distopt", True):
        assert [[s.name for s in specs if s.decay == decays] for decays in (True, False)] == case[
            "param_group_names"
        ]
    groups = create_groups(ParallelLayout(world), rank)
    optimizer, seen = optimizer_of([specs], groups, OptimConfig(clip_norm=spec["clip"])), []
    for data in case["data"]:
        x, y = (torch.tensor(part) for part in data[rank])
        optimizer.zero_grad()
        loss = golden_loss([spec.param for spec in specs], x, y)
        (loss / world).backward()
        optimizer.reduce_grads(0)
        optimizer.finish_grads()
        norm_sq = optimizer.local_norm_sq()
        all_reduce(norm_sq, groups.world)
        optimizer.step(rates(spec["lr"], spec["wd"]), norm_sq.sqrt())
        optimizer.gather_params(0)
        numbers = {"loss": loss.item(), "norm": norm_sq.sqrt().item()}
        seen.append({**numbers, "params": [p.detach().float().tolist() for p in params]})
    return seen


@pytest.mark.parametrize(
    "case", [case for case in GOLDEN if maps(case)], ids=lambda case: str(case["spec"])
)
def test_training_equals_golden(case: dict[str, Any]):
    # Losses are means, and gradients sums, of a few dozen numbers, in both programs; parameters in
    # bf16 are rounded last.
    allowed = (
        {"terms": 2, "dtype": torch.bfloat16}
        if case["spec"]["dtype"] == "bf16"
        else {"terms": 2 * 32}
    )
    for rank, seen in enumerate(run_distributed(golden_run, case["world"], case)):
        for ours, golden in zip(seen, case["steps"], strict=True):
            mine, wanted = numbered(ours["params"]), numbered(golden["params"])
            mine |= {"loss": ours["loss"], "norm": ours["norm"]}
            wanted |= {"loss": golden["loss"][rank], "norm": golden["grad_norm"]}
            expect_sums(mine, wanted, **allowed)
