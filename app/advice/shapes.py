"""Search space of layouts on a given number of GPUs: degrees of parallelism and what goes with
them.

`app.rules` decides whether they are legal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from app.advice.moves import Value, can_recompute, rungs
from app.choices import GraphImpl, GraphScope, Recompute, ScheduleName, StaticCapacity
from app.config import Run
from app.plan.cost.flops import ParameterCount
from app.plan.memory.overheads import CUDA_CONTEXT
from app.plan.memory.rank_memory import bytes_per_parameter, main_bytes
from app.plan.parts.dispatcher import run_dispatcher, without_waits
from app.plan.select import select_stages
from app.plan.sharding.optimizers import moment_bytes
from app.plan.stages import spelled_layout

Values = dict[str, Value]  # dotted key -> value

# of a sequence on a context-parallel rank: below, communication outweighs attention
LEAST_TOKENS = 1024
# of a microbatch of several sequences: tokens on a rank beyond which GEMMs of all tokens gain
# little, and rows of an expert beyond which grouped GEMMs do
MOST_TOKENS, MOST_ROWS = 8192, 3072
MICRO_BATCHES = (1, 2, 4, 8)
# (name, stages per rank)
SCHEDULES = (
    (ScheduleName("1f1b"), 1),
    (ScheduleName.interleaved, 2),
    (ScheduleName.interleaved, 4),
    (ScheduleName.zero_bubble_h1, 1),
    (ScheduleName.zero_bubble_v, 2),
)
IN_PARTS: Values = {"cuda_graph.optimizer": False}  # for graph modes other than full_iteration
# for a split into stages that parallel.layout spells out
ONE_SPLIT: Values = {
    "parallel.vpp": 1,
    "parallel.first": None,
    "parallel.last": None,
    "parallel.count_embedding": False,
    "parallel.count_head": False,
}
STATIC_ROWS = "model.moe.static.capacity"


@dataclass(frozen=True, slots=True)
class Shape:
    """Degrees of parallelism."""

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int | None  # None for a dense model

    @classmethod
    def of(cls, run: Run) -> Shape:
        """Return the shape of a run."""
        p = run.parallel
        etp = (p.tp if p.etp is None else p.etp) if run.model.moe else None
        return cls(p.tp, p.cp, p.pp, p.ep, etp)

    def values(self, run: Run) -> Values:
        """Return the keys that give a run this shape; empty for its own."""
        if self == Shape.of(run):
            return {}
        experts: Values = {} if self.etp is None else {"parallel.etp": self.etp}
        return {
            "parallel.world_size": run.world_size,
            "parallel.dp": None,
            "parallel.tp": self.tp,
            "parallel.cp": self.cp,
            "parallel.pp": self.pp,
            "parallel.ep": self.ep,
            **experts,
        }

    def state_bytes(self, run: Run, count: ParameterCount) -> int:
        """Return bytes of parameters, gradients, optimizer state and CUDA context on a mean rank.

        This is a lower bound for the busiest rank.
        """
        params, grads, _ = bytes_per_parameter(run.precision, run.optim)
        shard = main_bytes(run.precision) + moment_bytes(run.optim.name, run.optim)
        dense = (count.total - count.experts) / (self.tp * self.pp)
        expert = count.experts / ((self.etp or 1) * self.ep * self.pp)
        replicas = run.world_size // (self.tp * self.pp)  # context-parallel ranks share the state
        expert_replicas = run.world_size // ((self.etp or 1) * self.ep * self.pp)
        owned = dense / replicas + expert / expert_replicas
        return int((params + grads) * (dense + expert) + shard * owned) + CUDA_CONTEXT

    def gains(self, run: Run, size: int) -> bool:
        """Return whether microbatches of `size` sequences are clearly faster than smaller ones."""
        tokens = size * run.train.seq_len // (self.tp * self.cp)
        if (moe := run.model.moe) is None:
            return tokens <= MOST_TOKENS
        rows = tokens * moe.top_k * self.ep * (self.etp or 1) // moe.num_experts
        return tokens <= MOST_TOKENS or rows <= MOST_ROWS


def shapes(run: Run) -> Iterator[Shape]:
    """Yield all shapes whose degrees divide the world, the experts and the node."""
    world = run.world_size
    moe = run.model.moe
    sequence = run.train.seq_len
    for tp in _divisors(run.parallel.gpus_per_node):
        for cp in (cp for cp in _divisors(world) if cp == 1 or sequence // cp >= LEAST_TOKENS):
            for pp in (pp for pp in _divisors(world) if pp <= run.model.num_layers):
                if world % (tp * cp * pp):
                    continue
                if moe is None:
                    yield Shape(tp, cp, pp, 1, None)
                    continue
                for ep in _divisors(moe.num_experts):
                    for etp in dict.fromkeys((1, tp)):
                        if world % (etp * ep * pp) == 0:
                            yield Shape(tp, cp, pp, ep, etp)


def micro_batches(run: Run, shape: Shape) -> Iterator[int]:
    """Yield the numbers of sequences in a microbatch that divide the global batch."""
    dp = run.world_size // (shape.tp * shape.cp * shape.pp)
    for size in sorted({*MICRO_BATCHES, run.train.micro_batch}):
        tried = size <= run.train.micro_batch or shape.gains(run, size)
        if tried and run.train.global_batch % (size * dp) == 0:
            yield size


def schedules(run: Run, pp: int) -> Iterator[Values]:
    """Yield pipeline schedules with their stages; a run's own split where it has as many stages."""
    plain: Values = {"schedule.group_size": None}
    if pp == 1:
        yield plain | {"schedule.name": ScheduleName.auto} | _stages(run, 1, 1)
        return
    for name, vpp in SCHEDULES:
        if pp * vpp <= run.model.num_layers:
            yield plain | {"schedule.name": name} | _stages(run, pp, vpp)


def _stages(run: Run, pp: int, vpp: int) -> Values:
    """Return keys for equally many layers per stage; the first stages take the remainder."""
    own = select_stages(run)
    if (own.pp, own.vpp) == (pp, vpp):
        return {}
    unset = {key: value for key, value in ONE_SPLIT.items() if key != "parallel.vpp"}
    size, more = divmod(run.model.num_layers, pp * vpp)
    if not more:
        return unset | {"parallel.layout": None, "parallel.vpp": vpp}
    sizes = [size + 1] * more + [size] * (pp * vpp - more)
    return unset | {"parallel.layout": spelled_layout(sizes), "parallel.vpp": 1}


def graph_modes(run: Run) -> Iterator[Values]:
    """Yield graph modes: as set, partial graphs without the token exchange, and full iteration.

    Full iteration with experts on several ranks needs a dispatcher that does not wait for the host.
    """
    yield {}
    captured: tuple[GraphScope, ...] = (GraphScope.attn, GraphScope.mlp)
    if run.model.moe is not None:
        captured = (*captured, GraphScope.moe_router, GraphScope.moe_preprocess)
        if all(map(run.model.is_moe_layer, range(run.model.num_layers))):
            captured = tuple(part for part in captured if part is not GraphScope.mlp)
    if run.cuda_graph.impl is not GraphImpl.local:
        yield {"cuda_graph.impl": GraphImpl.local, **IN_PARTS, "cuda_graph.scope": captured}
    whole: Values = {"cuda_graph.impl": GraphImpl.full_iteration, "cuda_graph.scope": ()}
    dispatcher = run_dispatcher(run)
    if dispatcher is not None and dispatcher.waits_for_host:
        whole |= without_waits()
        yield whole | {STATIC_ROWS: StaticCapacity.factor}
    yield whole


def recompute_ladder(run: Run) -> Iterator[Values]:
    """Yield keys from no recomputation to whole layers, cheapest first."""
    phases: tuple[Recompute, ...] = ()
    plain: Values = {"recompute.full": False, "recompute.partial_microbatches": 0}
    yield plain | {"recompute.phases": phases}
    have: set[Recompute] = set()
    for wanted, _ in rungs(run):
        have |= wanted
        phases = tuple(phase for phase in Recompute if phase in have and can_recompute(run, phase))
        yield plain | {"recompute.phases": phases}
    yield plain | {"recompute.phases": (), "recompute.full": True}


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
