"""Frozen parameters: beside torch, in every layout, in memory and in checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from app.choices import GraphImpl, GraphScope
from app.config import CudaGraphConfig, RecomputeConfig, Run
from app.data.feed import Batch
from app.engine.build import build_chunks
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.dispatchers import build_dispatcher
from app.engine.files.checkpoints import read_manifest, read_whole_manifest
from app.engine.files.names import LEFT_OUT
from app.engine.ranks.groups import create_groups
from app.engine.step.engine import Engine
from app.errors import ConfigError
from app.model.chunk import Chunk
from app.model.init import init_weights
from app.plan.sharding.frozen import frozen_in, frozen_numel, names_of
from app.planner.plan import Plan
from app.rules.frozen import check_frozen
from tests.cases import chosen
from tests.checkpoints import cursor_of, save_checkpoint
from tests.distributed import run_distributed
from tests.parity import Trained, few_steps, results
from tests.processes.layouts import Case, run_of
from tests.processes.test_layouts import alone
from tests.rounding import error
from tests.runs import batches_of, engine_of, train_steps, whole_parameters

STEPS = 3
FROZEN = {
    # the tied table, the first layers, and all but a matrix of the last one
    "dense": ("embedding", "layers.0-1", "layers.3", "!layers.3.attn.wo"),
    # the head, norms, routers and experts of some layers
    "moe": ("head", "*norm*", "layers.1", "layers.2.moe.experts", "*.router"),
    "late": ("*", "!layers.3", "!head"),
}
ORDER = ("none", "all_gather", "auto")
LAYOUTS: dict[str, tuple[str, Case]] = {  # model, tp, cp, ep, etp, pp, vpp, dp
    "dp2": ("dense", ("dense", 1, 1, 1, 1, 1, 1, 2, *ORDER)),
    "tp2 cp2": ("dense", ("dense", 2, 2, 1, 1, 1, 1, 1, *ORDER)),
    "dp4 ep2": ("moe", ("moe", 1, 1, 2, 1, 1, 1, 4, *ORDER)),
    "tp2 dp2 etp2": ("moe", ("moe", 2, 1, 1, 2, 1, 1, 2, *ORDER)),
    "dense pp4": ("dense", ("dense", 1, 1, 1, 1, 4, 1, 1, "1f1b", *ORDER[1:])),
    "late pp4": ("late", ("moe", 1, 1, 1, 1, 4, 1, 1, "1f1b", *ORDER[1:])),
    "late pp2 split": ("late", ("moe", 1, 1, 1, 1, 2, 1, 2, "zero_bubble_h1", *ORDER[1:])),
    "late v": ("late", ("moe", 1, 1, 1, 1, 2, 2, 1, "zero_bubble_v", *ORDER[1:])),
    "moe pp2 tp2 split": ("moe", ("moe", 2, 1, 1, 1, 2, 1, 1, "zero_bubble_h1", *ORDER[1:])),
    "late interleaved": ("late", ("moe", 1, 1, 1, 1, 2, 2, 1, "interleaved", *ORDER[1:])),
    "moe static": ("moe", ("moe", 1, 1, 2, 1, 1, 1, 2, "none", "all_gather", "static")),
}
QUICK = ["tp2 cp2", "tp2 dp2 etp2", "late pp4", "late v", "moe pp2 tp2 split"]


def frozen(run: Run, kind: str, **more: object) -> Run:
    """The run without training what FROZEN names."""
    train = dataclasses.replace(run.train, frozen=FROZEN[kind])
    return dataclasses.replace(run, train=train, **more)


def model_of(kind: str) -> str:
    return "dense" if kind == "dense" else "moe"


def by_torch(rank: int, run: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of torch.optim.AdamW on modules with requires_grad=False."""
    plan = Plan(dataclasses.replace(run, train=dataclasses.replace(run.train, frozen=())))
    groups = create_groups(plan.layout, rank)
    device = torch.device("cpu")
    built = build_dispatcher(plan.run, groups.layer_groups(run.parallel.cp_comm_type), device)
    (chunk,) = build_chunks(
        plan.run, plan.stages, groups, dispatcher=built.dispatcher, device=device
    )
    init_weights(chunk.weights(), groups.coords, run.model, seed=run.train.seed)
    names = frozen_in(run)
    params = {named.name: (named.weight, param) for named, param in chunk.weights()}
    for name, (_, param) in params.items():
        param.requires_grad_(name not in names)
    trained = [pair for name, pair in params.items() if name not in names]
    optim = run.optim
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [param for weight, param in trained if weight.decay == decays],
                "weight_decay": optim.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    losses = []
    for step in range(STEPS):
        batches = batches_of(run, step, 0)
        total = sum(int((batch.labels_BS >= 0).sum()) for batch in batches)
        loss = sum((_loss(chunk, batch, total, len(batches)) for batch in batches), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([param for _, param in trained], optim.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach().flatten().clone() for name, (_, param) in params.items()}


def _loss(chunk: Chunk, batch: Batch, total: int, count: int) -> torch.Tensor:
    context = chunk.context(batch.positions_BS, batch.ends_BD)
    out = chunk(batch.tokens_BS, context)
    routing = sum((report.loss for report in out.routing), torch.zeros(()))
    return chunk.loss(out.x, batch.labels_BS, context) / total + routing / count


@pytest.fixture(scope="module")
def one_process() -> dict[str, Trained]:
    return {
        kind: run_distributed(few_steps, 1, frozen(run_of(alone(model_of(kind))), kind), STEPS)[0]
        for kind in FROZEN
    }


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_run_equals_torch(one_process: dict[str, Trained], kind: str):
    run = frozen(run_of(alone(model_of(kind))), kind)
    _, wanted = run_distributed(by_torch, 1, run)[0]
    found = one_process[kind]["parameters"]
    assert found.keys() == wanted.keys() - frozen_in(run)
    for name, value in found.items():
        assert error(value, wanted[name].numpy()) < 1e-5, name


def steps_on_rank_zero(rank: int, run: Run) -> Trained | None:
    """Train, and see that frozen parameters keep their bits, and memory is as planned."""
    engine = engine_of(run, rank)
    before = [each.main.clone() for each in engine.frozen]
    found = results(engine, STEPS)
    for each, value in zip(engine.frozen, before, strict=True):
        assert torch.equal(each.main, value), each.spec.name
        assert each.spec.param.grad is None
    expect_planned_memory(engine)
    return None if rank else found


def expect_planned_memory(engine: Engine) -> None:
    """Elements of parameters, gradients and states are the plan's."""
    plan, rank = engine.plan, engine.groups.pp_rank
    buffers = [each.buffer for chunk in engine.optimizer.grad_buckets for each in chunk]
    held = sum(each.main.numel() for each in engine.frozen)
    assert held == frozen_numel(plan.run, plan.layout, plan.stages.stages[rank])
    states = sum(
        value.numel()
        for chunk in engine.optimizer.shards
        for shard in chunk
        for value in shard.moments.values()
    )
    planned = {part.name: part.bytes for part in plan.memory[rank].parts}
    assert planned["parameters"] == 4 * (sum(each.params.numel() for each in buffers) + held)
    assert planned["gradients"] == 4 * sum(each.grads.numel() for each in buffers)
    assert planned["optimizer"] == 4 * states


@pytest.mark.every(3)
@pytest.mark.parametrize("name", chosen(LAYOUTS, QUICK))
def test_layouts_freeze_like_one_process(one_process: dict[str, Trained], name: str):
    kind, case = LAYOUTS[name]
    run = frozen(run_of(case), kind)
    found = run_distributed(steps_on_rank_zero, run.world_size, run)[0]
    for what, values in one_process[kind].items():
        assert found[what].keys() == values.keys()
        for key, value in values.items():
            assert error(found[what][key], value) < 1e-5, (what, key)


def test_backward_ends_at_the_first_trained_layer():
    """Nothing before it keeps activations: only the last layer and the head are trained."""
    run = frozen(run_of(alone("moe")), "late")
    assert run_distributed(reached, 1, run) == [[False, False, False, True]]


def reached(rank: int, run: Run) -> list[bool]:
    """Whether backward reaches the output of each layer."""
    engine = engine_of(run, rank)
    (chunk,), found = engine.chunks, []
    for layer in chunk.in_order:
        layer.register_forward_hook(lambda *args: found.append(args[-1][0].requires_grad))
    batch = batches_of(run, 0, 0)[0]
    chunk(batch.tokens_BS, chunk.context(batch.positions_BS, batch.ends_BD))
    return found


SAME_BITS: dict[str, tuple[str, dict[str, object]]] = {
    "whole layers again": ("moe", {"recompute": RecomputeConfig(full=True)}),
    "graphs of parts": (
        "dense",
        {"cuda_graph": CudaGraphConfig(GraphImpl.local, (GraphScope.attn, GraphScope.mlp))},
    ),
    "graph of a step": ("late", {"cuda_graph": CudaGraphConfig(GraphImpl.full_iteration)}),
}


@pytest.mark.parametrize("name", chosen(SAME_BITS, ["graphs of parts"]))
def test_graphs_and_recomputation_change_no_bit(name: str):
    kind, sections = SAME_BITS[name]
    run = frozen(run_of(alone(model_of(kind))), kind)
    more = dataclasses.replace(run, **sections)
    plain, other = (run_distributed(few_steps, 1, each, STEPS)[0] for each in (run, more))
    for what, values in plain.items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(other[what][key]), torch.as_tensor(value)), key


def saved(rank: int, run: Run, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of two steps, and the parameters two steps after it."""
    engine = engine_of(run, rank)
    train_steps(run, engine, 2)
    cursor = cursor_of(8, rank)
    path = save_checkpoint(folder, engine, run, Progress(2, 2), cursor=cursor)
    train_steps(run, engine, 2, first=2)
    return path, whole_parameters(engine)


def resumed(rank: int, run: Run, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The parameters two steps after a checkpoint, and sums of frozen ones."""
    engine = engine_of(run, rank)
    if LEFT_OUT not in read_manifest(path):  # it must fill them
        for each in engine.frozen:
            each.main.zero_()
    load_checkpoint(path, read_manifest(path), engine)
    train_steps(run, engine, 2, first=2)
    return whole_parameters(engine), {each.spec.name: each.main.numel() for each in engine.frozen}


@pytest.mark.every(2)
@pytest.mark.parametrize("whole", (True, False), ids=("with frozen", "without"))
def test_resume_in_any_layout(tmp_path: Path, whole: bool):
    kept = dataclasses.replace(run_of(alone("moe")).checkpoint, frozen=whole)
    run, other = (
        frozen(run_of(LAYOUTS[name][1]), "moe", checkpoint=kept)
        for name in ("moe static", "moe pp2 tp2 split")
    )
    ((path, wanted), *_) = run_distributed(saved, run.world_size, run, tmp_path)
    names = frozen_in(run)
    assert names.isdisjoint(read_manifest(path)["parts"]) or whole
    for found, _ in run_distributed(resumed, run.world_size, run, path):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    for found, _ in run_distributed(resumed, other.world_size, other, path):
        assert max(error(found[name], value) for name, value in wanted.items()) < 1e-5
    if whole:
        assert read_whole_manifest(path)["parts"].keys() >= names
        return
    with pytest.raises(ConfigError, match=r"lacks .* frozen weights .*checkpoint.frozen=true"):
        read_whole_manifest(path)
    reseeded = dataclasses.replace(run, train=dataclasses.replace(run.train, seed=7))
    with pytest.raises(AssertionError, match="saved without frozen weights"):
        run_distributed(resumed, run.world_size, reseeded, path)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("embedding", ["embedding"]),
        ("layers.0-1", ["layers.0.attn.wo", "layers.1.attn.wo", "layers.1.attn.wqkv"]),
        ("layers.1-999999999.attn.w?", ["layers.1.attn.wo", "layers.10.attn.wo"]),
        ("layers.*.wqkv", ["layers.1.attn.wqkv"]),
        ("!layers.[1]", ["layers.1.attn.wo", "layers.1.attn.wqkv"]),
        ("layers.1-0", []),
        ("layers", ["layers.0.attn.wo", *(f"layers.1.attn.{name}" for name in ("wo", "wqkv")),
                    "layers.10.attn.wo"]),
        ("embed", []),
    ],
)  # fmt: skip
def test_patterns_of_names(pattern: str, matched: list[str]):
    layers = ("0.attn.wo", "1.attn.wo", "1.attn.wqkv", "10.attn.wo")
    names = ["embedding", *(f"layers.{name}" for name in layers)]
    assert names_of(pattern, names) == matched


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (("embeding",), "matches no parameter of .*; did you mean embedding"),
        (("*",), "freezes every parameter"),
        (("!head",), "is the first; write for example"),
    ],
)
def test_patterns_that_are_refused(patterns: tuple[str, ...], said: str):
    plain = run_of(alone("dense"))
    run = dataclasses.replace(plain, train=dataclasses.replace(plain.train, frozen=patterns))
    with pytest.raises(ConfigError, match=said):
        check_frozen(run)


def test_left_out_weights_need_frozen_ones():
    plain = run_of(alone("dense"))
    checkpoint = dataclasses.replace(plain.checkpoint, frozen=False)
    with pytest.raises(ConfigError, match=r"train\.frozen names none"):
        check_frozen(dataclasses.replace(plain, checkpoint=checkpoint))
