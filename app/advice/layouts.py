"""Fastest layouts of a run on its GPUs, also for a slower network between nodes.

Best-first search by a lower bound: no layout is faster than the mean work of its ranks without
recomputation, host launches or bubble. In order of that bound, every layout is planned with its
schedules, graph modes and the least recomputation that fits, until no bound is below the times
found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from app.advice.even_stages import even_layout
from app.advice.layout_rows import Cost, LayoutComparison, LayoutRow
from app.advice.least_work import LeastWork
from app.advice.moves import Value, with_values
from app.advice.shapes import (
    IN_PARTS,
    ONE_SPLIT,
    Shape,
    Values,
    graph_modes,
    micro_batches,
    recompute_ladder,
    schedules,
    shapes,
)
from app.advice.suggest import typed
from app.advice.trials import Trials
from app.choices import GraphImpl
from app.config import Run
from app.errors import ConfigError
from app.plan.cost.flops import ParameterCount, parameter_count
from app.plan.parts.dispatcher import run_dispatcher
from app.plan.recompute import NOTHING, RecomputePolicy, recompute_policy
from app.plan.select import select_stages
from app.planner.plan import Plan
from app.rules import check

ROWS = 8  # fastest layouts shown at each network speed
SLOWER = 0.5  # default slower network, as a share of the network's bandwidth
MOST_TRIALS = 900  # layouts that a search plans at each network speed, some seconds
MOST_SHAPES = 32  # shapes and microbatches whose combinations are planned
MOST_STAGES = 16  # up to which layers are moved between them until they take equally long
NO_GRAPHS: Values = {"cuda_graph.impl": GraphImpl.none, **IN_PARTS, "cuda_graph.scope": ()}


def compare_layouts(
    plan: Plan,
    tokens: float | None = None,
    slower_gb_s: float | None = None,
    *,
    trials: Trials | None = None,
) -> LayoutComparison:
    """Compare the fastest layouts that fit, at two network bandwidths, with the run's own.

    tokens: the number that GPU hours are counted for; None means those of train.steps. slower_gb_s:
    the second bandwidth; None means half of the first. trials: counts the plans meanwhile.
    """
    run = plan.run
    network = run.hardware.network_gb_s
    slower = SLOWER * network if slower_gb_s is None else slower_gb_s
    if tokens is None:
        tokens = run.steps * run.train.global_batch * run.train.seq_len
    trials = trials or Trials(plan.gpu_memory)
    search = _Search(run, trials)
    complete = True
    chosen: dict[Run, None] = {run: None}
    for speed in (network, slower):
        found, whole = search.fastest(speed)
        chosen |= dict.fromkeys(found)
        complete = complete and whole
    rows: dict[LayoutRow, LayoutRow] = {}
    for each in chosen:  # the run itself first, so that an equal layout under other keys is dropped
        row = _row(each, run, trials, tokens=tokens, slower=slower)
        rows.setdefault(dataclasses.replace(row, own=False, overrides=()), row)
    # the run itself may not fit: it is shown behind what does, however fast it would be
    ranked = sorted(rows.values(), key=lambda row: (not row.fits, row.cost.seconds))
    shown = (row for row in ranked if row.fits or row.own)
    return LayoutComparison(
        run.world_size,
        tokens,
        plan.gpu_memory,
        network_gb_s=network,
        slower_gb_s=slower,
        planned=search.planned,
        complete=complete,
        rows=tuple(shown),
    )


def fastest_layouts(run: Run, trials: Trials, most: int) -> list[Run]:
    """Return the run in the fastest layouts that fit, fastest first, with its own graphs and
    dispatcher.

    most: layouts that the search plans.
    """
    search = _Search(run, trials, modes=lambda run: iter(({},)))
    return search.fastest(run.hardware.network_gb_s, most)[0]


def layout_search(run: Run, trials: Trials, most: int) -> list[Run]:
    """Return laid-out runs with every schedule and microbatch, those of the fastest shapes first.

    most: layouts that the search for the fastest shapes plans.
    """
    search = _Search(run, trials)
    best, _ = search.fastest(run.hardware.network_gb_s, most)
    ranks = {Shape.of(each): place for place, each in enumerate(best)}
    bounds = sorted(search.bounds(), key=lambda found: (ranks.get(found[2], len(ranks)), found[0]))
    found: dict[Run, None] = dict.fromkeys(best)
    for _, _, shape, size, rung in bounds[:MOST_SHAPES]:
        found |= dict.fromkeys(search.stages(run, shape, size, rung))
    return list(found)


def _row(run: Run, own: Run, trials: Trials, tokens: float, slower: float) -> LayoutRow:
    """Build a row, planned with all microbatches."""
    plan = trials.plan(run)
    layout = plan.layout
    memory = trials.memory(run, whole=True)
    dispatcher = run_dispatcher(run)
    return LayoutRow(
        run == own,
        tuple(overrides_between(own, run)),
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        vpp=plan.stages.vpp,
        dp=layout.dp,
        ep=layout.ep,
        etp=layout.expert_tp,
        micro_batch=run.train.micro_batch,
        microbatches=run.num_microbatches,
        schedule=plan.schedule_name.value,
        recompute=recomputed(recompute_policy(run)),
        graphs=captured(run),
        dispatcher=dispatcher.kind.value if dispatcher else None,
        memory=memory,
        fits=memory <= trials.limit,
        cost=Cost.of(run, plan.step_seconds, tokens),
        slower=Cost.of(run, trials.plan(_networked(run, slower)).step_seconds, tokens),
    )


def recomputed(policy: RecomputePolicy) -> tuple[str, ...]:
    """Return what a policy recomputes: parts of layers, or "full"."""
    if policy.usual.whole_layers:
        return ("full",)
    return () if policy.usual == NOTHING else tuple(sorted(p.value for p in policy.usual.parts))


def captured(run: Run) -> str:
    """Return what CUDA graphs capture, in words."""
    match run.cuda_graph.impl:
        case GraphImpl.none:
            return "none"
        case GraphImpl.full_iteration:
            return "full iteration"
        case _:
            return "partial" if run.cuda_graph.scope else "layers"


def _networked(run: Run, gb_s: float) -> Run:
    return dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, network_gb_s=gb_s))


# sections whose keys a layout may set
COMPARED = ("parallel", "schedule", "recompute", "cuda_graph")


def overrides_between(own: Run, run: Run) -> Iterator[str]:
    """Yield the overrides that turn run `own` into `run`."""
    pairs: list[tuple[str, Any, Any]] = [
        ("train.micro_batch", own.train.micro_batch, run.train.micro_batch)
    ]
    for section in COMPARED:
        before, after = getattr(own, section), getattr(run, section)
        for each in dataclasses.fields(before):
            pairs.append(
                (f"{section}.{each.name}", getattr(before, each.name), getattr(after, each.name))
            )
    if own.model.moe is not None and run.model.moe is not None:
        before, after = own.model.moe, run.model.moe
        pairs.append(("model.moe.dispatcher", before.dispatcher, after.dispatcher))
        capacities = before.static.capacity, after.static.capacity
        pairs.append(("model.moe.static.capacity", *capacities))
    recipes = own.precision.fp8.recipe, run.precision.fp8.recipe
    pairs.append(("precision.fp8.recipe", *recipes))
    yield from (f"{key}={typed(after)}" for key, before, after in pairs if before != after)


@dataclass
class _Search:
    """Search over shapes, each with its best schedule, graph mode and recomputation."""

    run: Run
    trials: Trials
    modes: Callable[[Run], Iterator[Values]] = graph_modes
    planned: int = 0
    # by shape, sequences of a microbatch, rung of recomputation; None: not legal
    least: dict[tuple[Shape, int, int], LeastWork | None] = field(default_factory=dict)
    even: dict[Run, str | None] = field(default_factory=dict)  # stages that take equally long
    fitting: dict[Run, bool] = field(default_factory=dict)  # runs at the network's own speed

    def fastest(self, network: float, most: int | None = None) -> tuple[list[Run], bool]:
        """Return the fastest runs, one per shape, and whether the search was complete."""
        run = _networked(self.run, network)
        limit = self.planned + (MOST_TRIALS if most is None else most)
        waiting = list(self.bounds())
        heapify(waiting)
        best: dict[Shape, tuple[float, Run]] = {}
        while waiting and self.planned < limit:
            bound, number, shape, size, rung = heappop(waiting)
            if bound >= _last(best):
                return self._found(best), self.alike
            if (higher := self._rung(shape, size, rung)) == rung:
                self._expand(run, shape, size, rung=rung, best=best)
            elif (seconds := self._bound(shape, size, higher)) is not None:
                heappush(waiting, (seconds, number, shape, size, higher))
        return self._found(best), not waiting and self.alike

    def _found(self, best: dict[Shape, tuple[float, Run]]) -> list[Run]:
        """Return the fastest runs, with the network's own speed restored."""
        ranked = sorted(best.values(), key=lambda pair: pair[0])[:ROWS]
        return [_networked(run, self.run.hardware.network_gb_s) for _, run in ranked]

    def bounds(self) -> Iterator[tuple[float, int, Shape, int, int]]:
        """Yield (lower bound in seconds, number, shape, sequences of a microbatch, rung)."""
        run = self.run
        pairs = ((shape, size) for shape in shapes(run) for size in micro_batches(run, shape))
        for number, (shape, size) in enumerate(pairs):
            if shape.state_bytes(run, self.count) <= self.trials.limit:
                seconds = self._bound(shape, size, 0)
                self.trials.bounded += 1
                if seconds is not None:
                    yield seconds, number, shape, size, 0

    @cached_property
    def ladder(self) -> tuple[Values, ...]:
        """Overrides of recomputation, from least to most."""
        return tuple(recompute_ladder(self.run))

    @cached_property
    def alike(self) -> bool:
        """True if all layers save equally much.

        Otherwise `_rung` may skip what fits: the first ranks have most microbatches in flight, and
        may have the lighter layers.
        """
        return len(set(self.run.model.layer_specs)) == 1

    @cached_property
    def count(self) -> ParameterCount:
        """Parameters of the model."""
        return parameter_count(self.run.model)

    def _microbatches(self, shape: Shape, size: int) -> int:
        dp = self.run.world_size // (shape.tp * shape.cp * shape.pp)
        return self.run.train.global_batch // (size * dp)

    def _bound(self, shape: Shape, size: int, rung: int) -> float | None:
        """Return a lower bound on the seconds of a step, at the network's own speed.

        None if not legal.
        """
        least = self._least(shape, size, rung)
        if least is None:
            return None
        return self._microbatches(shape, size) * least.seconds / shape.pp

    def _rung(self, shape: Shape, size: int, rung: int) -> int:
        """Return the least recomputation, from `rung` on, whose state and saved tensors may fit.

        With pp microbatches in flight, some rank holds at least its mean share of them.
        """
        flying = min(self._microbatches(shape, size), shape.pp) / shape.pp
        state = shape.state_bytes(self.run, self.count)
        for place in range(rung, len(self.ladder) - 1):
            least = self._least(shape, size, place)
            if least is not None and state + flying * least.bytes <= self.trials.limit:
                return place
        return len(self.ladder) - 1

    def _least(self, shape: Shape, size: int, rung: int) -> LeastWork | None:
        """Return the lower bounds of a shape; None if it is not legal.

        They do not depend on pp if pipeline ranks vary slowest and the same rules hold for every
        pp.
        """
        alike = self.run.parallel.order.lower().endswith("dp-pp")
        key = dataclasses.replace(shape, pp=1 if alike else shape.pp), size, rung
        if key not in self.least:
            values = shape.values(self.run) | self.ladder[rung] | {"train.micro_batch": size}
            order = next(schedules(self.run, shape.pp))
            legal = self._legal(self.run, values | order | NO_GRAPHS)
            self.least[key] = None if legal is None else LeastWork(legal, self.trials.known.parts)
        return self.least[key]

    def _expand(
        self,
        run: Run,
        shape: Shape,
        size: int,
        rung: int,
        best: dict[Shape, tuple[float, Run]],
    ) -> None:
        """Record the fastest schedule, graph mode and recomputation of a shape that fits, if fast
        enough.
        """
        for laid_out in self.stages(run, shape, size, rung):
            for mode in self.modes(laid_out):
                for kept in self.ladder[rung:]:
                    legal = self._legal(laid_out, mode | kept)
                    if legal is None:
                        continue
                    most = min(_last(best), best.get(shape, (inf, run))[0])
                    seconds = self._seconds(legal, most)
                    if seconds >= most:
                        break  # more recomputation is slower still
                    if self._fits(legal):
                        best[shape] = seconds, legal
                        break
                    if kept is self.ladder[rung] and not self._may_fit(laid_out, mode):
                        break

    def stages(self, run: Run, shape: Shape, size: int, rung: int) -> Iterator[Run]:
        """Yield the runs of a shape with every schedule: with equally many layers per stage, and
        with stages that take equally long.
        """
        for order in schedules(run, shape.pp):
            laid_out = with_values(run, shape.values(run) | order | {"train.micro_batch": size})
            yield laid_out
            legal = self._legal(laid_out, NO_GRAPHS | self.ladder[rung])
            if legal is None or not 1 < len(select_stages(legal).in_order) <= MOST_STAGES:
                continue
            usual = _networked(legal, self.run.hardware.network_gb_s)
            if usual not in self.even:  # the other network slows all stages alike, or nearly
                self.even[usual] = even_layout(self.trials.plan(usual))
            layout = self.even[usual]
            if layout is not None:
                yield with_values(laid_out, {**ONE_SPLIT, "parallel.layout": layout})

    def _seconds(self, run: Run, most: float) -> float:
        self.planned += 1
        return self.trials.seconds(run, most)

    def _fits(self, run: Run) -> bool:
        """Return whether a run fits with just enough microbatches, and then with all, which take
        more graphs.
        """
        usual = _networked(run, self.run.hardware.network_gb_s)
        if usual not in self.fitting:
            fits = self.trials.fits(usual) and self.trials.fits(usual, whole=True)
            self.fitting[usual] = fits
        return self.fitting[usual]

    def _may_fit(self, laid_out: Run, mode: Values) -> bool:
        """Return False if a run does not fit with the most recomputation either."""
        most = self._legal(laid_out, mode | self.ladder[-1])
        return most is None or self._fits(most)

    def _legal(self, run: Run, values: dict[str, Value]) -> Run | None:
        with suppress(ConfigError):
            return check(with_values(run, values))
        return None


def _last(best: dict[Shape, tuple[float, Run]]) -> float:
    """Return the time of the last row so far; inf while rows are left."""
    times = sorted(seconds for seconds, _ in best.values())
    return times[ROWS - 1] if len(times) >= ROWS else inf
