"""Shared by test_kept_memory.py and other tests."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from app.choices import (
    CpComm,
    Dtype,
    ScheduleName,
)
from app.config import (
    LossConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    Run,
    TrainConfig,
)
from app.engine.build import adapter_dropout, build_chunks
from app.engine.dispatchers import build_dispatcher
from app.engine.ranks.groups import create_groups
from app.engine.rehearsal.clock import Alive
from app.model.ahead import AHEAD, AheadLosses
from app.model.chunk import Chunk
from app.model.layers.frozen import freeze
from app.model.layers.layer_groups import own_tokens
from app.model.layers.weight_grads import WeightGradQueue, WeightGradSink
from app.model.lora import add_adapters, hold_base
from app.moe.dispatch.paged_buffer import PagedBuffer
from app.plan.actions import Backward, Forward
from app.plan.layout import select_layout
from app.plan.memory.activations import MicrobatchMemory, chunk_activations
from app.plan.parts.paged_buffer import PlannedPagedBuffer, planned_paged_buffer
from app.plan.recompute import recompute_policy
from app.plan.select import select_stages
from app.plan.sharding.frozen import frozen_in
from app.rules import check
from tests.tensors.activation_memory import attention_of, sums_of

SEQUENCES, LENGTH = 2, 128


DENSE = ModelConfig(
    num_layers=2, hidden_size=128, ffn_hidden_size=352, num_heads=8, num_kv_heads=8, vocab_size=1000
)


def run_of(
    model: ModelConfig, ordered: bool = False, chunk_tokens: int | None = None, **parallel: Any
) -> Run:
    return check(
        Run(
            model,
            ParallelConfig(**parallel),
            train=TrainConfig(
                seq_len=LENGTH, micro_batch=SEQUENCES, global_batch=8, deterministic=ordered
            ),
            precision=PrecisionConfig(Dtype.bfloat16),
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
    built = build_dispatcher(
        run,
        groups.layer_groups(run.parallel.cp_comm_type),
        cpu,
        paged_buffer=paged_buffer and PagedBuffer(paged_buffer, cpu),
    )
    (chunk,) = build_chunks(
        run, select_stages(run), groups, dispatcher=built.dispatcher, device=cpu
    )
    freeze(chunk, {named.name: param for named, param in chunk.weights()}, frozen_in(run))
    if run.adapters is not None:
        dropout = adapter_dropout(run, groups, cpu)
        add_adapters(chunk, run.adapters, dropout)
        if dropout is not None:
            dropout.active = True
    torch.manual_seed(rank)
    for param in chunk.parameters():
        torch.nn.init.normal_(param, 0.0, 0.02)
    if run.lora.base is not None:
        hold_base(chunk, run.lora.base, cpu)
    for param in chunk.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    places = own_tokens(LENGTH, layout.cp, layout.coords(rank)["cp"])
    tokens, labels = torch.randint(0, run.model.vocab_size, (2, SEQUENCES, LENGTH))[:, :, places]
    positions = places.expand(SEQUENCES, -1)
    ahead = tokens_ahead(chunk, tokens, labels)
    inputs = [tokens, labels, positions, *ahead.values()]

    splits = run.schedule.name is ScheduleName.zero_bubble_h1

    def loss(sink: WeightGradSink | None) -> Tensor:
        again = recompute_policy(run).usual
        context = chunk.context(positions, None, sink, again, extras=ahead)
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


def tokens_ahead(chunk: Chunk, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Inputs and labels of its layers of multi-token prediction, if it has some."""
    layers = chunk.model.mtp.layers
    if not layers:
        return {}
    AheadLosses(layers, [chunk], tokens.device)
    return {AHEAD: torch.stack([torch.stack([tokens, labels])] * layers, dim=1)}


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


def cpu_masks(run: Run, rank: int) -> int:
    """Return the bytes of masks saved on a CPU.

    Causal attention of fewer queries than keys has no kernel there, nor has a window: they store
    their masks.
    """
    layout, gathered = select_layout(run), run.parallel.cp_comm_type is CpComm.all_gather
    calls = [(LENGTH, LENGTH)]  # queries and keys
    if layout.cp > 1 and gathered:
        piece, here = LENGTH // (2 * layout.cp), layout.coords(rank)["cp"]
        calls = [(piece, (n + 1) * piece) for n in (here, 2 * layout.cp - 1 - here)]
    windows = [spec.attention.window for spec in run.model.layer_specs]
    return 2 * sum(
        queries * keys
        for window in windows
        for queries, keys in calls
        if queries < keys or (window or keys) < keys
    )
