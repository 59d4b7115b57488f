"""The memory plan against chunks that are cut over several ranks: what autograd keeps, and what
is alive while they compute.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from app.choices import (
    Balance,
    CpComm,
    DispatcherKind,
    Dtype,
    Recompute,
    ScheduleName,
    StaticTransport,
)
from app.config import (
    DataConfig,
    LossConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
    YarnConfig,
)
from app.config.model import EchoConfig, StaticConfig
from app.engine.build import build_chunks
from app.engine.dispatchers import build_dispatcher
from app.engine.groups import create_groups
from app.model.chunk import Chunk
from app.model.context_parallel import own_tokens
from app.model.weight_grads import WeightGradQueue, WeightGradSink
from app.moe.dispatch.paged_buffer import PagedBuffer
from app.plan.actions import Backward, Forward
from app.plan.dispatchers.paged_buffer import PlannedPagedBuffer, planned_paged_buffer
from app.plan.layout import select_layout
from app.plan.memory.activations import MicrobatchMemory, chunk_activations
from app.plan.recompute import recompute_policy
from app.plan.select import select_stages
from app.rules import check
from tests.cases import chosen, sampled
from tests.distributed import run_distributed
from tests.tensors.test_activation_memory import Alive, attention_of, sums_of, with_kernels

SEQUENCES, LENGTH = 2, 128
DENSE = ModelConfig(
    num_layers=2, hidden_size=128, ffn_hidden_size=352, num_heads=8, num_kv_heads=8, vocab_size=1000
)
GROUPED = dataclasses.replace(DENSE, num_kv_heads=4, qk_norm=True)
EXPERTS = MoEConfig(
    num_experts=8, top_k=2, ffn_hidden_size=64, force_balance=True, planned_imbalance=1.0
)


kernels = pytest.fixture(autouse=True)(with_kernels)


def run_of(
    model: ModelConfig, mask: bool = False, chunk_tokens: int | None = None, **parallel: Any
) -> Run:
    return check(
        Run(
            model,
            ParallelConfig(**parallel),
            train=TrainConfig(
                seq_len=LENGTH, micro_batch=SEQUENCES, global_batch=8, deterministic=mask
            ),
            precision=PrecisionConfig(Dtype.bfloat16),
            data=DataConfig(document_mask=mask),
            loss=LossConfig(chunk_tokens=chunk_tokens),
        )
    )


def planned(run: Run) -> MicrobatchMemory:
    return chunk_activations(run, select_stages(run).stages[0][0], select_layout(run)).usual


def pool_of(run: Run) -> PlannedPagedBuffer | None:
    """Return the page pool for one microbatch."""
    stages = select_stages(run).stages[0]
    return planned_paged_buffer(run, stages, [Forward(0, 0), Backward(0, 0)])


def measured(rank: int, run: Run) -> tuple[dict[str, int], int, int, int, int]:
    """Phase -> bytes kept; and alive at most in forward, in the end, at most in backward, and in
    the end of that.

    The least of three times: gloo's threads may hold what has been sent a moment longer.
    """
    layout = select_layout(run)
    groups, cpu = create_groups(layout, rank), torch.device("cpu")
    paged_buffer = pool_of(run)
    dispatcher = build_dispatcher(
        run,
        groups.layer_groups(run.parallel.cp_comm_type),
        cpu,
        paged_buffer=paged_buffer and PagedBuffer(paged_buffer, cpu),
    )
    (chunk,) = build_chunks(run, select_stages(run), groups, dispatcher=dispatcher, device=cpu)
    torch.manual_seed(rank)
    for param in chunk.parameters():
        torch.nn.init.normal_(param, 0.0, 0.02)
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    places = own_tokens(LENGTH, layout.cp, layout.coords(rank)["cp"])
    tokens, labels = torch.randint(0, run.model.vocab_size, (2, SEQUENCES, LENGTH))[:, :, places]
    positions = places.expand(SEQUENCES, -1)
    documents = (
        torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64) if run.data.document_mask else None
    )
    inputs = [tokens, labels, positions] + ([] if documents is None else [documents])

    splits = run.schedule.name is ScheduleName.zero_bubble_h1

    def loss(sink: WeightGradSink | None) -> Tensor:
        context = chunk.context(positions, documents, sink, recompute_policy(run).usual)
        out = chunk(tokens, context)
        return sum(
            (r.loss for r in out.routing if r.loss.requires_grad),
            chunk.loss(out.x, labels, context),
        )

    with attention_of(run), kept_by_phase(chunk, [*chunk.parameters(), *inputs]) as kept:
        loss(sums_of(run))
    if cpu_masks(run, rank):  # nor can a mode see how that mask is made
        return dict(kept), 0, 0, 0, 0

    def alive() -> tuple[int, int, int, int]:
        sink = WeightGradQueue() if splits else sums_of(run)
        with attention_of(run), Alive([*chunk.parameters(), *inputs]) as seen:
            root = loss(sink)
            forward, left = seen.peak, seen.live
            seen.peak = seen.live
            root.backward()
            return forward, left, seen.peak, seen.live

    return dict(kept), *map(min, *(alive() for _ in range(3)))


@contextmanager
def kept_by_phase(chunk: Chunk, known: list[Tensor]) -> Iterator[Counter[str]]:
    """Bytes of the storages that a phase's operations are the first to save."""
    found, seen, alive, place = (
        Counter[str](),
        {address(tensor) for tensor in known},
        list[Tensor](),
        ["head"],
    )

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)  # else another tensor may get the same address
        if address(tensor) not in seen:
            # cosines and sines of all heads
            shared = tensor.shape[2:] == (1, chunk.model.rope.width)
            found["rotary" if shared else place[-1]] += tensor.untyped_storage().nbytes()
        seen.add(address(tensor))
        return tensor

    def within(name: str, function: Any) -> Any:
        def run(*values: Any, **options: Any) -> Any:
            place.append(name)
            try:
                return function(*values, **options)
            finally:
                place.pop()

        return run

    for layer in chunk.layers.values():
        layer._attend = within("attn", layer._attend)
        layer.phases = tuple(
            dataclasses.replace(phase, run=within(phase.name.value, phase.run))
            for phase in layer.phases
        )
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


LATENT = dataclasses.replace(
    DENSE, mla=MLAConfig(96, 64, 8, qk_rope_head_dim=8, v_head_dim=12), yarn=YarnConfig()
)
CUT = {
    "tp 2": (DENSE, {"tp": 2}),
    "tp 4": (GROUPED, {"tp": 4}),
    "tp 2 norms of all heads, biases": (
        dataclasses.replace(GROUPED, qk_norm_whole=True, qkv_bias=True),
        {"tp": 2},
    ),
    "cp 2": (DENSE, {"cp": 2}),
    "cp 4": (GROUPED, {"cp": 4}),
    "cp 2 heads": (DENSE, {"cp": 2, "cp_comm_type": CpComm.all_to_all}),
    "cp 4 heads": (GROUPED, {"cp": 4, "cp_comm_type": CpComm.all_to_all}),
    "latent tp 2": (LATENT, {"tp": 2}),
    "latent cp 2": (LATENT, {"cp": 2}),
    "latent tp 2 cp 2 heads": (LATENT, {"tp": 2, "cp": 2, "cp_comm_type": CpComm.all_to_all}),
    "tp 2 cp 2": (GROUPED, {"tp": 2, "cp": 2}),
    "tp 2 cp 2 heads": (GROUPED, {"tp": 2, "cp": 2, "cp_comm_type": CpComm.all_to_all}),
}


def cpu_masks(run: Run, rank: int) -> int:
    """Return the bytes of masks saved on a CPU.

    Causal attention of fewer queries than keys has no kernel there, and stores its mask.
    """
    layout, gathered = select_layout(run), run.parallel.cp_comm_type is CpComm.all_gather
    if layout.cp == 1 or not gathered or run.data.document_mask:
        return 0
    piece, here = LENGTH // (2 * layout.cp), layout.coords(rank)["cp"]
    ends = [number + 1 for number in (here, 2 * layout.cp - 1 - here) if number]
    return run.model.num_layers * sum(piece * end * piece for end in ends) * 2


def compare(run: Run) -> None:
    """Every rank keeps what is planned to the byte; what is alive is within 2 %, on the rank
    that is fastest to let go of it.
    """
    memory = planned(run)
    expected = Counter({phase: size for phase, size in memory.kept.items() if size})
    # the first thing and the last outside of layers
    expected["head"] += expected.pop("embedding", 0)
    found = run_distributed(measured, run.world_size, run)
    for rank, (kept, *_) in enumerate(found):
        assert Counter(kept) - Counter(attn=cpu_masks(run, rank)) == expected
    # under a mask a CPU's attention needs other memory while it runs
    if not cpu_masks(run, 0) and not run.data.document_mask:
        forward, left, backward = (min(sizes) for sizes in list(zip(*found, strict=True))[1:4])
        assert left == pytest.approx(memory.total, rel=1e-3)
        assert forward == pytest.approx(memory.total + memory.forward, rel=0.02)
        assert backward == pytest.approx(memory.total + memory.backward, rel=0.02)


@pytest.mark.cover(1)
@pytest.mark.parametrize(("model", "choices"), sampled(CUT.values(), 3), ids=CUT)
@pytest.mark.parametrize("mask", [True, False], ids=["documents", "causal"])
def test_dense_layers_and_the_ends_of_a_model_that_are_cut(
    model: ModelConfig, choices: dict[str, Any], mask: bool
):
    compare(run_of(model, mask, **choices))


@pytest.mark.parametrize("chunk_tokens", sampled([96, 64, 256], 3))
@pytest.mark.parametrize("tp", [1, 2])
def test_a_loss_by_chunks(tp: int, chunk_tokens: int):
    compare(run_of(dataclasses.replace(DENSE, vocab_size=4000), chunk_tokens=chunk_tokens, tp=tp))


def moe(**choices: Any) -> ModelConfig:
    return dataclasses.replace(DENSE, moe=dataclasses.replace(EXPERTS, **choices))


EVEN, GATHERS = {"capacity_factor": 1.0}, {"dispatcher": DispatcherKind.all_gather}
COLLECTIVE = StaticConfig(StaticTransport.collective)
STATIC = {"dispatcher": DispatcherKind.static, "static": COLLECTIVE}
FILLED = {"capacity_factor": 1.5, "pad_to_capacity": True}
SENT = {
    "ep 2": (moe(), {"ep": 2, "dp": 2}),
    "etp 2": (moe(), {"etp": 2, "dp": 2}),
    "ep 2 etp 2": (moe(), {"ep": 2, "etp": 2, "dp": 4}),
    "tp 2": (moe(), {"tp": 2}),
    "cp 2 ep 2": (moe(), {"cp": 2, "ep": 2}),
    "gathered": (moe(**GATHERS), {"ep": 2, "dp": 2}),
    "gathered parts": (moe(**GATHERS), {"ep": 2, "etp": 2, "dp": 4}),
    "static": (moe(**STATIC), {"ep": 2, "dp": 2}),
    "static parts": (moe(**STATIC), {"ep": 2, "etp": 2, "dp": 4}),
    "clones": (moe(**STATIC, echo=EchoConfig(spares=2)), {"ep": 4, "dp": 4}),
    "static capacity": (moe(**STATIC, **EVEN), {"ep": 2, "dp": 2}),
    "capacity": (moe(**EVEN), {"ep": 2, "dp": 2}),
    "capacity here": (moe(**EVEN), {}),
    "filled": (moe(**FILLED), {"ep": 2, "etp": 2, "dp": 4}),
    "filled here": (moe(**FILLED), {}),
    "filled and gathered": (moe(**FILLED, **GATHERS), {"ep": 2, "dp": 2}),
    "jitter": (moe(jitter_eps=0.1, balance=Balance.sequence), {"tp": 2, "etp": 1}),
    "global": (moe(balance=Balance.global_batch), {"cp": 2}),
}


RECOMPUTED: dict[str, tuple[Recompute, ...]] = {
    "nothing": (),
    "activations": (Recompute.experts_act,),
    "experts": (Recompute.moe,),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["none", "zero_bubble_h1"])
@pytest.mark.parametrize("phases", RECOMPUTED.values(), ids=RECOMPUTED)
@pytest.mark.parametrize(
    "parallel", chosen([{"ep": 4, "dp": 4}, {"ep": 2, "etp": 2, "dp": 4}], [{"ep": 4, "dp": 4}])
)
def test_rows_are_restored_from_pages(
    parallel: dict[str, Any], phases: tuple[Recompute, ...], name: str
):
    """Checks memory outside the pool, while backward copies rows out of it."""
    whole, run = (
        dataclasses.replace(
            run_of(moe(**STATIC | {"static": static}), **parallel),
            recompute=RecomputeConfig(phases=phases),
            schedule=ScheduleConfig(ScheduleName(name)),
        )
        for static in (COLLECTIVE, dataclasses.replace(COLLECTIVE, paged_buffer=1.1))
    )
    memory, before = planned(run), planned(whole)
    found = run_distributed(measured, run.world_size, run)
    forward, left, backward, end = (min(sizes) for sizes in list(zip(*found, strict=True))[1:])
    assert left == pytest.approx(memory.total, rel=1e-3)
    assert forward == pytest.approx(memory.total + memory.forward, rel=0.02)
    assert backward == pytest.approx(memory.total + memory.backward, rel=0.02)
    if name == "zero_bubble_h1":
        assert end == pytest.approx(memory.waiting, rel=0.01)
    gone, pool = before.total - memory.total, pool_of(run)
    ratio = 4 if parallel["ep"] == 4 else 2  # rows that there is memory for, over their mean
    assert pool.bytes == pytest.approx(1.1 / ratio * gone, rel=0.05) if gone else pool.pages == 1


@pytest.mark.parametrize(("model", "parallel"), sampled(SENT.values(), 3), ids=SENT)
def test_layers_of_experts_with_even_load(model: ModelConfig, parallel: dict[str, Any]):
    compare(run_of(model, **parallel))
