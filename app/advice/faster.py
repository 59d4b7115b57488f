"""Changes that make a fitting run faster, by measured speeds: every suggestion is planned again.

Single changes come first, each with its own gain; then, in the order of their gains, as many of
them together as gain more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.advice.even_stages import even_layout
from app.advice.moves import Change, Move, Value, can_recompute
from app.advice.shapes import Shape
from app.advice.suggest import ENOUGH, Candidate
from app.advice.trials import Trials
from app.choices import AttentionBackendKind, Fp8Recipe, GraphImpl, Recompute, ScheduleName
from app.config import Fp8Config, Run
from app.config.layout import OF_ALL, OF_DELAYED
from app.plan.parts.dispatcher import run_dispatcher, without_waits
from app.plan.parts.fp8 import RECIPES
from app.planner.attention import asks
from app.planner.plan import Plan
from app.planner.suggestion import Suggestion

GAIN = 0.98  # of a step's time: a smaller gain is within the error of the estimate


def whole_graph(run: Run) -> Iterator[Change]:
    """Capture the full iteration in one graph, with a dispatcher that needs no host sync."""
    values: dict[str, Value] = {"cuda_graph.impl": GraphImpl.full_iteration, "cuda_graph.scope": ()}
    static: dict[str, Value] = {**without_waits()}
    dispatcher = run_dispatcher(run)
    waits = dispatcher is not None and dispatcher.waits_for_host
    if run.cuda_graph.impl is not GraphImpl.full_iteration:
        yield Change(values | (static if waits else {}), "what the host would launch is recorded")
    elif dispatcher is not None and dispatcher.ranks > 1:
        yield Change(static, "tokens travel once per rank")


def less_recompute(run: Run) -> Iterator[Change]:
    """Recompute less in backward."""
    cost = "more memory: less recomputation"
    if run.recompute.full:
        values: dict[str, Value] = {"recompute.full": False}
        if run.recompute.partial_microbatches:
            values["recompute.partial_microbatches"] = 0
        yield Change(values, cost)
        parts = (Recompute.norm, Recompute.mlp_act, Recompute.shared, Recompute.moe)
        phases = tuple(phase for phase in parts if can_recompute(run, phase))
        names = ", ".join(phase.value for phase in phases)
        yield Change(
            values | {"recompute.phases": phases}, f"more memory: recomputes {names} alone"
        )
    if run.recompute.phases:
        yield Change({"recompute.phases": ()}, cost)
    if run.recompute.offload:
        waits = "more GPU memory: nothing waits in host memory"
        yield Change({"recompute.offload": ()}, waits)
    if run.loss.chunk_tokens is not None:
        yield Change({"loss.chunk_tokens": None}, cost)


def larger_microbatch(run: Run) -> Iterator[Change]:
    """Double the sequences of a microbatch."""
    if Shape.of(run).gains(run, 2 * run.train.micro_batch):
        yield Change({"train.micro_batch": 2 * run.train.micro_batch}, "more memory: larger GEMMs")


def fewer_parts(run: Run) -> Iterator[Change]:
    """Halve tp, cp or pp in favour of more replicas."""
    replicas: dict[str, Value] = {"parallel.world_size": run.world_size, "parallel.dp": None}
    for axis in ("tp", "cp", "pp"):
        degree = getattr(run.parallel, axis)
        if degree % 2 == 0 and not (axis == "pp" and run.parallel.layout):
            values: dict[str, Value] = {f"parallel.{axis}": degree // 2, **replicas}
            if axis == "pp" and degree == 2:
                values |= {"parallel.vpp": 1, "schedule.name": ScheduleName.auto}
            yield Change(values, "more memory: as many GPUs, in more replicas")


def other_schedules(run: Run) -> Iterator[Change]:
    """Try the other pipeline schedules, with the stages per rank that each takes."""
    if run.parallel.pp == 1 or run.parallel.layout:
        return
    own: dict[str, Value] = {"schedule.group_size": None}
    for name, vpp in (
        (ScheduleName("1f1b"), 1),
        (ScheduleName.interleaved, 2),
        (ScheduleName.interleaved, 4),
        (ScheduleName.zero_bubble_h1, 1),
        (ScheduleName.zero_bubble_v, 2),
    ):
        if (run.schedule.name, run.parallel.vpp) != (name, vpp):
            values: dict[str, Value] = {"schedule.name": name, "parallel.vpp": vpp}
            group = own if run.schedule.group_size is not None else {}
            yield Change(values | group, "another order of forwards and backwards")


def even_stages(run: Run) -> Iterator[Change]:
    """Move layers so that stages take equally long."""
    layout = even_layout(Plan(run))
    if layout is None:
        return
    unset: dict[str, Value] = {
        f"parallel.{name}": None
        for name in ("first", "last")
        if getattr(run.parallel, name) is not None
    }
    counted: dict[str, Value] = {
        f"parallel.{name}": False
        for name in ("count_embedding", "count_head")
        if getattr(run.parallel, name)
    }
    values: dict[str, Value] = {"parallel.layout": layout}
    yield Change(values | unset | counted, "none: layers lie where they take equally long")


BY_LIBRARY = (
    "Transformer Engine, on GPUs like Hopper or newer; memory grows with the square of the length"
)


def faster_attention(run: Run) -> Iterator[Change]:
    """Compute attention's gradients in a fixed order by cuDNN's kernel instead of torch's."""
    by_library = AttentionBackendKind.transformer_engine
    values: dict[str, Value] = {"train.attention_backend": by_library}
    if run.train.deterministic and not asks(run) and run.train.attention_backend is not by_library:
        yield Change(values, BY_LIBRARY)


def other_recipe(run: Run) -> Iterator[Change]:
    """Try the other FP8 recipes, and 16 bits: small GEMMs may lose by quantization."""
    fp8, key = run.precision.fp8, "precision.fp8"
    if fp8.recipe is None:
        return
    for recipe, facts in RECIPES.items():
        if fp8.by_library and recipe is not fp8.recipe:
            unread = () if recipe is Fp8Recipe.delayed else OF_DELAYED
            yield Change(_usual(fp8, unread) | {f"{key}.recipe": recipe}, facts.cost)
    cost = "GEMMs in 16 bits, which take less time than with this recipe"
    yield Change(_usual(fp8, (*OF_ALL, *OF_DELAYED)) | {f"{key}.recipe": None}, cost)


def _usual(fp8: Fp8Config, names: Sequence[str]) -> dict[str, Value]:
    """Return the defaults of those keys that are set to something else."""
    usual = Fp8Config()
    return {
        f"precision.fp8.{name}": getattr(usual, name)
        for name in names
        if getattr(fp8, name) != getattr(usual, name)
    }


MOVES: tuple[Move, ...] = (
    whole_graph,
    other_recipe,
    faster_attention,
    less_recompute,
    larger_microbatch,
    fewer_parts,
    other_schedules,
    even_stages,
)


@dataclass(frozen=True, slots=True)
class _Faster:
    """A candidate that fits, and the seconds of its step."""

    candidate: Candidate
    seconds: float


def faster(plan: Plan) -> tuple[Suggestion, ...]:
    """Return changes that make a fitting run faster: single ones and the best combination, fastest
    first.

    Empty for a run that does not fit, or whose hardware has no profile.
    """
    if plan.profile is None or not plan.fits:
        return ()
    trials = Trials(plan.gpu_memory)
    before = trials.seconds(plan.run)
    start = Candidate(plan.run)
    singles = sorted(_timed(start.neighbours(MOVES), trials), key=lambda found: found.seconds)
    singles = [found for found in singles if found.seconds < GAIN * before]
    together = _together(singles, trials)
    found = [*([together] if together else []), *singles]
    shown = (_suggestion(each, before, trials) for each in found[:ENOUGH])
    return tuple(each for each in shown if each.memory <= trials.limit)


def _suggestion(found: _Faster, before: float, trials: Trials) -> Suggestion:
    """Build the suggestion, with memory planned for all microbatches."""
    return Suggestion(
        found.candidate.overrides,
        trials.memory(found.candidate.run, whole=True),
        found.seconds / before,
        cost=found.candidate.cost,
    )


def _timed(candidates: Iterator[Candidate], trials: Trials) -> Iterator[_Faster]:
    """Yield the candidates that fit once their pipeline is full, with their times."""
    for candidate in candidates:
        if trials.memory(candidate.run) <= trials.limit:
            yield _Faster(candidate, trials.seconds(candidate.run))


def _together(singles: Sequence[_Faster], trials: Trials) -> _Faster | None:
    """Return the fastest single change with every other that adds a gain; None if none does."""
    if not singles:
        return None
    best = singles[0]
    for other in singles[1:]:
        change = other.candidate.changes[0]
        taken = {key for each in best.candidate.changes for key in each.values}
        if taken & set(change.values):
            continue
        added = _timed(best.candidate.neighbours([lambda run, c=change: iter([c])]), trials)  # type: ignore[misc]
        best = min([best, *added], key=lambda found: found.seconds)
    return best if len(best.candidate.changes) > 1 else None
