"""Changes that make a run fit its GPUs, cheapest first.

Every suggestion is planned before it is made. Beam search over changes: each round tries every
legal change of the runs that do not fit yet, and continues from those that came nearest. The price
is the estimated time of a step relative to the run as it is. `moves` lists the changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from app.advice.moves import KEEP_GPUS, MORE_GPUS, TWICE, Change, Move, Value, with_values
from app.advice.trials import Trials
from app.config import Run
from app.errors import ConfigError
from app.planner.plan import Plan
from app.planner.suggestion import Suggestion
from app.rules import check

ENOUGH = 5  # suggestions
BEAM = 6  # runs that a round continues from
ROUNDS = 8  # changes in one suggestion at most
MOST_WORK = 1_000_000  # actions that a search replays before it must stop: some seconds


@dataclass(frozen=True)
class Candidate:
    """A run some changes away from the one that does not fit."""

    run: Run
    changes: tuple[Change, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        """All changes as typed on the command line; the last one of a key counts."""
        values = {key: value for change in self.changes for key, value in change.values.items()}
        return tuple(f"{key}={typed(value)}" for key, value in values.items())

    @property
    def cost(self) -> str:
        """Cost of all changes, in words."""
        costs = Counter(change.cost for change in self.changes)
        if (doubled := costs[TWICE]) > 1:
            costs[f"{2**doubled} times the GPUs"] = costs.pop(TWICE)
        return "; ".join(+costs)

    def neighbours(self, moves: Sequence[Move]) -> Iterator[Candidate]:
        """Yield every legal run one change further."""
        for change in (change for move in moves for change in move(self.run)):
            with suppress(ConfigError):  # an illegal one is no neighbour
                yield Candidate(
                    check(with_values(self.run, change.values)), (*self.changes, change)
                )


def suggest(plan: Plan) -> tuple[Suggestion, ...]:
    """Return changes that make a run fit, cheapest first.

    Empty for a run that fits, or if nothing helps. More GPUs are suggested only if nothing else
    helps.
    """
    if plan.fits:
        return ()
    trials = Trials(plan.gpu_memory)
    found = _search(plan.run, KEEP_GPUS, trials) or _search(
        plan.run, (*KEEP_GPUS, *MORE_GPUS), trials
    )
    before = step_seconds(plan.run)
    by_price = sorted(
        found, key=lambda candidate: (step_seconds(candidate.run), len(candidate.changes))
    )
    return tuple(_suggestions(by_price, before, trials))


def _suggestions(
    candidates: Sequence[Candidate], before: float, trials: Trials
) -> Iterator[Suggestion]:
    """Yield the first few that fit when planned in full, without supersets of earlier ones."""
    given: list[set[str]] = []
    for candidate in candidates:
        overrides = set(candidate.overrides)
        if len(given) == ENOUGH or any(fewer <= overrides for fewer in given):
            continue
        if given and trials.work > 2 * MOST_WORK:
            return
        memory = trials.memory(candidate.run, whole=True)
        if memory <= trials.limit:
            given.append(overrides)
            yield Suggestion(
                candidate.overrides,
                memory,
                step_seconds(candidate.run) / before,
                cost=candidate.cost,
            )


def step_seconds(run: Run) -> float:
    """Return the estimated time of a step.

    Compute of the busiest pipeline rank with the pipeline's ramp, exposed traffic, and with a
    profile what follows the pipeline. With t the time of one microbatch on that rank: M·t + (pp −
    1)·t / vpp.
    """
    plan = Plan(run)
    pp = plan.layout.pp
    vpp = plan.stages.vpp
    pipeline = plan.stages.pipeline
    per_rank = [
        [plan.stage_seconds[pipeline.stage(rank, chunk)] for chunk in range(vpp)]
        for rank in range(pp)
    ]
    busiest = max(sum(stage.total for stage in stages) for stages in per_rank)
    pipeline_seconds = (run.num_microbatches + (pp - 1) / plan.stages.vpp) * busiest
    if plan.profile is not None:
        return pipeline_seconds + plan.tail.seconds  # stage times include exposed traffic already
    return pipeline_seconds + sum(t.seconds for t in plan.traffic if t.exposed)


def _search(run: Run, moves: Sequence[Move], trials: Trials) -> list[Candidate]:
    """Return the candidates that fit, from the first round that has some and the one after it."""
    frontier = [Candidate(run)]
    found = list[Candidate]()
    seen = {run}
    for _ in range(ROUNDS):
        last = bool(found)
        nearest: list[tuple[int, Candidate]] = []
        for candidate in (new for old in frontier for new in old.neighbours(moves)):
            if candidate.run in seen:
                continue
            if trials.work > MOST_WORK:
                return found
            seen.add(candidate.run)
            memory = trials.memory(candidate.run)
            if memory <= trials.limit:
                found.append(candidate)
            else:
                nearest.append((memory, candidate))
        frontier = [candidate for _, candidate in sorted(nearest, key=lambda pair: pair[0])[:BEAM]]
        if last or not frontier:
            break
    return found


def typed(value: Value) -> str:
    """Return a value as typed on the command line."""
    match value:
        case Enum():
            return str(value.value)
        case tuple():
            return f"[{','.join(map(typed, value))}]"
        case str() if "|" in value:
            return f"'{value}'"  # shells read | as a pipe
        case bool() | None:
            return {True: "true", False: "false", None: "null"}[value]
        case _:
            return str(value)
