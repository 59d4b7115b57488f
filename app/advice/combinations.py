"""Combinations of layout, schedule, microbatch, recomputation, graphs, dispatcher and FP8 recipe,
each with its planned time and memory.

The fastest shapes come first. From each shape in turn one combination is planned, until all are, or
as many as asked for: so the front of memory and time is known for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product

from app.advice.layouts import captured, layout_search, overrides_between, recomputed
from app.advice.moves import with_values
from app.advice.shapes import Values, graph_modes, recompute_ladder
from app.advice.trials import Trials
from app.choices import Fp8Recipe
from app.config import Run
from app.errors import ConfigError
from app.plan.layout import select_layout
from app.plan.parts.dispatcher import kinds_between_ranks, run_dispatcher
from app.plan.recompute import recompute_policy
from app.plan.select import select_schedule, select_stages
from app.rules import check

MOST = 1000  # combinations that are planned
MOST_S = 60.0  # seconds that planning may take
DISPATCHER = "model.moe.dispatcher"


@dataclass(frozen=True, slots=True)
class PlannedCombination:
    """A planned combination."""

    run: Run = field(repr=False)
    overrides: tuple[str, ...]  # that turn the typed run into it; empty for that run itself
    seconds: float  # planned, of a step
    memory: int  # planned, bytes of the busiest rank
    fits: bool

    @property
    def key(self) -> str:
        """Name of the combination in records."""
        return " ".join(sorted(self.overrides)) or "as typed"

    @property
    def choices(self) -> dict[str, str]:
        """Return the values chosen, by what they are of."""
        run = self.run
        layout, stages = select_layout(run), select_stages(run)
        dispatcher = run_dispatcher(run)
        own = "even" if run.parallel.layout is None else run.parallel.layout
        recipe = run.precision.fp8.recipe
        return {
            "tp": str(layout.tp),
            "cp": str(layout.cp),
            "pp": str(layout.pp),
            "ep": str(layout.ep),
            "etp": str(layout.expert_tp),
            "stages": f"{stages.vpp} per rank, {own}",
            "schedule": select_schedule(run, stages).value,
            "micro_batch": str(run.train.micro_batch),
            "recompute": ", ".join(recomputed(recompute_policy(run))) or "nothing",
            "graphs": captured(run),
            "dispatcher": dispatcher.kind.value if dispatcher else "none",
            "fp8": recipe.value if recipe else "none",
        }


def plan_combinations(
    run: Run,
    trials: Trials,
    recipes: Sequence[Fp8Recipe] = (),
    *,
    most: int = MOST,
    most_s: float = MOST_S,
) -> list[PlannedCombination]:
    """Plan combinations of a run's GPUs: the typed run, those that fit and those that do not, each
    in order of time.

    recipes: FP8 recipes that may be chosen beside the run's own. most, most_s: combinations and
    seconds after which planning ends.
    """
    end = time.monotonic() + most_s
    found = {run: planned(run, run, trials)}
    waiting = [_of_shape(each, trials, recipes) for each in layout_search(run, trials, most // 2)]
    while waiting:
        for combinations in tuple(waiting):
            if len(found) >= most or time.monotonic() > end:
                waiting.clear()
                break
            other = next(combinations, None)
            if other is None:
                waiting.remove(combinations)
            elif other not in found:
                found[other] = planned(other, run, trials)
    own = found.pop(run)
    # the same plan under other keys, as a schedule that is chosen anyway, is planned once
    alike: dict[tuple[object, ...], PlannedCombination] = {}
    order = sorted(
        found.values(), key=lambda each: (not each.fits, each.seconds, len(each.overrides))
    )
    for each in order:
        alike.setdefault((each.seconds, each.memory, *each.choices.values()), each)
    alike.pop((own.seconds, own.memory, *own.choices.values()), None)
    return [own, *alike.values()]


def planned(run: Run, own: Run, trials: Trials) -> PlannedCombination:
    """Plan a run as a combination of the run `own`."""
    memory = trials.memory(run)
    overrides = tuple(overrides_between(own, run))
    return PlannedCombination(
        run, overrides, trials.seconds(run), memory, fits=memory <= trials.limit
    )


def front(combinations: Sequence[PlannedCombination]) -> list[PlannedCombination]:
    """Return those that fit and than which no other is both faster and smaller, fastest first."""
    best: list[PlannedCombination] = []
    fitting = (each for each in combinations if each.fits)
    for each in sorted(fitting, key=lambda each: (each.seconds, each.memory)):
        if not best or each.memory < best[-1].memory:
            best.append(each)
    return best


def _of_shape(laid_out: Run, trials: Trials, recipes: Sequence[Fp8Recipe]) -> Iterator[Run]:
    """Yield the legal runs with the stages, schedule and microbatch of `laid_out`."""
    eight: list[Values] = [{}]
    for each in recipes:
        eight.append({"precision.fp8.recipe": each})
    for mode, kept, recipe in product(_modes(laid_out), recompute_ladder(laid_out), eight):
        with suppress(ConfigError):
            yield check(with_values(laid_out, mode | kept | recipe))


def _modes(run: Run) -> Iterator[Values]:
    """Yield graph modes, each with every dispatcher that it may have."""
    dispatcher = run_dispatcher(run)
    others = kinds_between_ranks() if dispatcher is not None and dispatcher.ranks > 1 else ()
    for mode in graph_modes(run):
        yield mode
        if DISPATCHER not in mode:
            for kind in others:
                if dispatcher is not None and kind not in ("auto", dispatcher.kind.value):
                    yield mode | {DISPATCHER: type(dispatcher.kind)(kind)}
