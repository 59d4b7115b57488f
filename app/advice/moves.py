"""Single changes that may make a run smaller, each with its cost.

A move looks at a run and yields changes; `app.rules` decides whether they are legal.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from app.choices import (
    AttentionBackendKind,
    CpComm,
    Dtype,
    GraphImpl,
    GraphKey,
    Offload,
    Recompute,
    ScheduleName,
)
from app.config import ModelConfig, Run
from app.plan.cost.flops import flops_per_token
from app.plan.parts.dispatcher import run_dispatcher
from app.planner.attention import asks

Value = int | float | str | bool | None | Enum | tuple[Enum, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a run."""

    values: dict[str, Value]  # dotted key -> new value
    cost: str  # in words


Move = Callable[[Run], Iterator[Change]]


def with_values(run: Run, values: dict[str, Value]) -> Run:
    """Return the run with some dotted keys changed.

    Each section is checked once it has all of its own.
    """
    changed: Run = _replaced(run, values)
    return changed


def _replaced(section: Any, values: Mapping[str, Value]) -> Any:
    """Return a section with the keys changed that are dotted from there."""
    own: dict[str, Any] = {}
    below: defaultdict[str, dict[str, Value]] = defaultdict(dict)
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            below[name][rest] = value
        else:
            own[name] = value
    for name, inner in below.items():
        own[name] = _replaced(getattr(section, name), inner)
    return dataclasses.replace(section, **own)


def recompute_more(run: Run) -> Iterator[Change]:
    """Recompute the next groups of phases, or whole layers."""
    if run.recompute.full:
        if run.recompute.partial_microbatches:
            yield Change(
                {"recompute.partial_microbatches": 0}, "every microbatch recomputes whole layers"
            )
        return
    have = set(run.recompute.phases)
    for wanted, cost in rungs(run):
        phases = tuple(
            phase
            for phase in Recompute
            if phase in have.union(wanted) and can_recompute(run, phase)
        )
        if set(phases) > have:
            yield Change({"recompute.phases": phases}, cost)
    others: dict[str, Value] = {"recompute.phases": ()} if have else {}
    if set(run.recompute.offload) - {Offload.layers}:
        others["recompute.offload"] = (Offload.layers,)  # no other part saves anything then
    yield Change({"recompute.full": True, **others}, "every forward twice")


Rung = tuple[frozenset[Recompute], str]
SOFTMAX: Rung = frozenset({Recompute.attn_core}), "attention's softmax twice"
CHEAP: Rung = (
    frozenset({Recompute.norm, Recompute.mlp_act, Recompute.experts_act}),
    "norms and activations twice",
)
OF_EXPERTS: tuple[Rung, ...] = (
    (frozenset({Recompute.shared}), "shared experts twice"),
    (frozenset({Recompute.moe}), "MoE forwards twice, with their communication"),
)


def rungs(run: Run) -> tuple[Rung, ...]:
    """Return groups of phases and their costs, cheapest recomputation per saved byte first."""
    if mostly_attention(run.model, run.train.seq_len):
        return CHEAP, *OF_EXPERTS, SOFTMAX
    return CHEAP, SOFTMAX, *OF_EXPERTS


@lru_cache(maxsize=64)
def mostly_attention(model: ModelConfig, seq_len: int) -> bool:
    """Return whether softmax attention has more than half of the FLOPs, as in long sequences."""
    flops = flops_per_token(model, seq_len)
    attention = 2 * (flops - flops_per_token(model, seq_len // 2))  # it grows with the length
    return attention > flops / 2


def can_recompute(run: Run, phase: Recompute) -> bool:
    """Return whether any layer has something to recompute under this name."""
    moe = run.model.moe
    layers = range(run.model.num_layers)
    match phase:
        case Recompute.mlp_act:
            return any(not run.model.is_moe_layer(layer) for layer in layers)
        case Recompute.experts_act | Recompute.moe:
            return moe is not None
        case Recompute.shared:
            return bool(moe and moe.shared_ffn_hidden_size)
        case _:
            return True


def smaller_microbatch(run: Run) -> Iterator[Change]:
    """Halve the sequences of a microbatch."""
    size = run.train.micro_batch
    if size > 1:
        yield Change({"train.micro_batch": size // 2}, "smaller GEMMs, not in the estimate")


def loss_by_chunks(run: Run) -> Iterator[Change]:
    """Compute the logits of fewer tokens at a time."""
    tokens = run.train.micro_batch * run.train.seq_len // run.parallel.cp
    if (run.loss.chunk_tokens or tokens) > CHUNK:
        yield Change({"loss.chunk_tokens": CHUNK}, "the head's GEMM twice")


# tokens: GEMMs are still large, and the fp32 loss needs memory for as many at once anyway
CHUNK = 1024


TWICE = "twice the GPUs"


def attention_by_torch(run: Run) -> Iterator[Change]:
    """Use torch's deterministic attention backward, which stores no matrix of all scores."""
    by_library = run.train.attention_backend is AttentionBackendKind.transformer_engine
    if by_library and run.train.deterministic and not asks(run):
        torch = AttentionBackendKind.torch
        yield Change(
            {"train.attention_backend": torch},
            "a slower kernel of attention, and other last digits",
        )


def more_tensor_parallel(run: Run) -> Iterator[Change]:
    """Double tp within a node, for experts too or with etp as it is."""
    tp = 2 * run.parallel.tp
    cost = "communication in every layer, narrower GEMMs"
    if tp <= run.parallel.gpus_per_node:
        yield Change(_with_dp(run, {"parallel.tp": tp}, 2), cost)
        if run.model.moe and run.parallel.etp is None:
            yield Change(
                _with_dp(run, {"parallel.tp": tp, "parallel.etp": run.parallel.tp}, 2), cost
            )


def more_context_parallel(run: Run) -> Iterator[Change]:
    """Double cp; gather keys and values where the heads are too few for an all-to-all."""
    cp = 2 * run.parallel.cp
    trades = run.parallel.cp_comm_type is CpComm.all_to_all
    gathers: dict[str, Value] = {}
    if trades and run.model.num_kv_heads // run.parallel.tp % cp:
        gathers["parallel.cp_comm_type"] = CpComm.all_gather
    yield Change(
        _with_dp(run, {"parallel.cp": cp, **gathers}, 2), "keys and values travel between ranks"
    )
    if run.parallel.cp > 1 and not trades:
        yield Change(
            {"parallel.cp_comm_type": CpComm.all_to_all},
            "queries and results travel too, keys once",
        )


def more_pipeline(run: Run) -> Iterator[Change]:
    """Double pp, with as many stages per rank or half of them."""
    p = run.parallel
    if p.layout is not None or p.first is not None or p.last is not None:
        return
    schedule: dict[str, Value] = (
        {"schedule.name": ScheduleName.auto} if run.schedule.name is ScheduleName.none else {}
    )
    for vpp in {p.vpp, max(1, p.vpp // 2)}:
        stages: dict[str, Value] = {"parallel.vpp": vpp} if vpp != p.vpp else {}
        yield Change(
            _with_dp(run, {"parallel.pp": 2 * p.pp, **stages, **schedule}, 2),
            "a longer pipeline to fill and drain",
        )


def more_expert_parallel(run: Run) -> Iterator[Change]:
    """Double ep."""
    if run.model.moe:
        yield Change({"parallel.ep": 2 * run.parallel.ep}, "tokens travel to experts further away")


def dispatcher_options(run: Run) -> Iterator[Change]:
    """Set the options with which the dispatcher needs less memory."""
    dispatcher = run_dispatcher(run)
    if dispatcher is not None:
        for option in dispatcher.smaller():
            yield Change({f"model.moe.{option.key}": option.value}, option.cost)


def fewer_in_flight(run: Run) -> Iterator[Change]:
    """Use a schedule with fewer microbatches in flight."""
    p = run.parallel
    if run.schedule.name is ScheduleName.gpipe:
        yield Change({"schedule.name": ScheduleName("1f1b")}, "none: the same bubble")
    if p.vpp > 1:
        values: dict[str, Value] = {
            "parallel.vpp": 1,
            "schedule.name": ScheduleName.auto,
            "schedule.group_size": None,
        }
        yield Change(values, f"{p.vpp} times the bubble")


def smaller_elements(run: Run) -> Iterator[Change]:
    """Store parameters and activations in two bytes instead of four."""
    if run.precision.params is Dtype.float32:
        yield Change(
            {"precision.params": Dtype.bfloat16}, "8 bits of mantissa in parameters and activations"
        )


def fewer_graph_buffers(run: Run) -> Iterator[Change]:
    """Share graphs between microbatches by slot, or capture none."""
    graph = run.cuda_graph
    whole: dict[str, Value] = {"cuda_graph.optimizer": False} if graph.optimizer else {}
    if (
        graph.impl in (GraphImpl.local, GraphImpl.transformer_engine)
        and graph.key is GraphKey.microbatch
    ):
        yield Change({"cuda_graph.key": GraphKey.slot}, "sent tensors are copied out of graphs")
    if graph.impl is not GraphImpl.none:
        values: dict[str, Value] = {"cuda_graph.impl": GraphImpl.none, "cuda_graph.scope": ()}
        yield Change(values | whole, "every kernel launched by the host")


def more_gpus(run: Run) -> Iterator[Change]:
    """Double the data-parallel replicas, which share the optimizer's state."""
    values: dict[str, Value] = {}
    if run.parallel.world_size:
        values["parallel.world_size"] = 2 * run.parallel.world_size
    if run.parallel.dp or not run.parallel.world_size:
        values["parallel.dp"] = 2 * run.dp
    per_step = run.train.micro_batch * 2 * run.dp
    if run.train.global_batch % per_step:
        values["train.global_batch"] = per_step * -(-run.train.global_batch // per_step)
    yield Change(values, TWICE)


def _with_dp(run: Run, values: dict[str, Value], factor: int) -> dict[str, Value]:
    """Return the values with dp divided by `factor`, so that the number of ranks stays."""
    if run.dp % factor:
        # the rules refuse it
        return {**values, "parallel.world_size": run.world_size, "parallel.dp": None}
    dp: dict[str, Value] = {"parallel.dp": run.dp // factor} if run.parallel.dp else {}
    return {**values, **dp}


KEEP_GPUS: tuple[Move, ...] = (
    recompute_more,
    smaller_microbatch,
    loss_by_chunks,
    attention_by_torch,
    more_tensor_parallel,
    more_context_parallel,
    more_pipeline,
    more_expert_parallel,
    dispatcher_options,
    fewer_in_flight,
    smaller_elements,
    fewer_graph_buffers,
)
MORE_GPUS: tuple[Move, ...] = (more_gpus,)
