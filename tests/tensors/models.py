"""Models for tests of tensors: chunks with their initial weights, built as the engine builds
them, without process groups.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.func import functional_call

from app.choices import CpComm, Dtype
from app.config import ModelConfig, ParallelConfig, PrecisionConfig
from app.engine.build import build_chunks
from app.engine.dispatchers import build_dispatcher
from app.engine.ranks.groups import Groups
from app.model.chunk import Chunk, ChunkOutput
from app.model.init import init_weights
from app.moe.experts import Dispatched, Experts
from app.plan.layout import select_layout
from app.plan.model.experts import ExpertWeights
from app.plan.stages import plan_stages
from tests.runs import make_run


def make_chunks(
    model: ModelConfig,
    *,
    ep: int = 1,
    rank: int = 0,
    vpp: int = 1,
    params: Dtype = Dtype.float32,
    seed: int = 1,
) -> tuple[Chunk, ...]:
    """The `vpp` chunks that `rank` of `ep` expert-parallel ranks holds; they compute without
    communication only for ep=1.
    """
    run = make_run(
        model,
        parallel=ParallelConfig(world_size=ep, dp=ep, ep=ep),
        precision=PrecisionConfig(params),
    )
    nobody = {
        field.name: None
        for field in dataclasses.fields(Groups)
        if field.name not in ("layout", "rank")
    }
    if ep > 1:
        nobody["etp_ep"] = SimpleNamespace(size=lambda: ep, rank=lambda: rank)
    groups = Groups(layout=select_layout(run), rank=rank, **nobody)
    cpu = torch.device("cpu")
    chunks = build_chunks(
        run,
        plan_stages(model.num_layers, 1, vpp, behind=model.mtp.layers),
        groups,
        dispatcher=build_dispatcher(run, groups.layer_groups(CpComm.all_gather), cpu).dispatcher,
        device=cpu,
    )
    for chunk in chunks:
        init_weights(chunk.weights(), groups.coords, model, seed=seed)
    return chunks


def make_chunk(model: ModelConfig, **options: int | Dtype) -> Chunk:
    """The whole model in one chunk."""
    (chunk,) = make_chunks(model, **options)
    return chunk


def forward(
    chunk: Chunk,
    tokens_BS: Tensor,
    positions_BS: Tensor | None = None,
    ends_BD: Tensor | None = None,
) -> ChunkOutput:
    """Logits, or hidden states in front of the last stage, of tokens whose positions count from
    0 unless given.
    """
    if positions_BS is None:
        positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    by_length = chunk.model.longrope or chunk.model.dynamic_rope
    length = int(positions_BS.max()) + 1 if by_length else 0
    out = chunk(tokens_BS, chunk.context(positions_BS, ends_BD, length=length))
    return dataclasses.replace(out, x=chunk.logits(out.x)) if chunk.last else out


def grouped_swiglu(rows_RD: Tensor, w1_ED2F: Tensor, w2_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """The experts with these weights; expert e owns rows ends[e-1] to ends[e]."""
    count, ffn, hidden = w2_EFD.shape
    weights = {"w_up.weight": w1_ED2F, "w_down.weight": w2_EFD}
    out_RD: Tensor = functional_call(
        Experts(ExpertWeights.of(hidden, ffn, count)), weights, (Dispatched(rows_RD, ends_E),)
    )
    return out_RD


def draw_tokens(model: ModelConfig, *shape: int, seed: int = 0) -> Tensor:
    """Uniform token ids."""
    return torch.randint(0, model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def mean_loss(chunk: Chunk, tokens_BS: Tensor) -> tuple[Tensor, ChunkOutput]:
    """Mean loss of the next tokens with the routers' losses, and what the chunk returned."""
    positions_BS = torch.arange(tokens_BS.shape[1] - 1).expand_as(tokens_BS[:, :-1])
    context = chunk.context(positions_BS, None)
    out = chunk(tokens_BS[:, :-1], context)
    loss = chunk.loss(out.x, tokens_BS[:, 1:], context) / tokens_BS[:, 1:].numel()
    return sum((report.loss for report in out.routing), loss), out
