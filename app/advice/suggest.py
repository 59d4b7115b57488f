"""What to change so that a run fits into its GPUs: cheapest first, every suggestion planned again
before it is made.

A search over single changes and then over combinations of them: each round takes every legal change
of the runs that do not fit yet, and goes on from those that have come nearest. The price is the
estimated time of a step beside that of the run as it is. `moves` says which changes there are.
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
from app.plan.plan import Plan
from app.plan.suggestion import Suggestion
from app.rules import check

ENOUGH = 5  # suggestions


BEAM = 6  # runs that a round goes on from


ROUNDS = 8  # changes in one suggestion at most


MOST_WORK = 1_000_000  # actions that a search walks along, some seconds, before it has to do


@dataclass(frozen=True)
class Candidate:
    """A run some changes away from the one that does not fit."""

    run: Run
    changes: tuple[Change, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        """All changes together as typed on the command line; the last one of a key counts."""
        values = {key: value for change in self.changes for key, value in change.values.items()}
        return tuple(f"{key}={typed(value)}" for key, value in values.items())

    @property
    def cost(self) -> str:
        """What is paid for all changes, in words."""
        costs = Counter(change.cost for change in self.changes)
        if (doubled := costs[TWICE]) > 1:
            costs[f"{2**doubled} times the GPUs"] = costs.pop(TWICE)
        return "; ".join(+costs)

    def neighbours(self, moves: Sequence[Move]) -> Iterator[Candidate]:
        """Every legal run one change further."""
        for change in (change for move in moves for change in move(self.run)):
            with suppress(ConfigError):  # an illegal one is no neighbour
                yield Candidate(
                    check(with_values(self.run, change.values)), (*self.changes, change)
                )


def suggest(plan: Plan) -> tuple[Suggestion, ...]:
    """Changes that make a run fit, cheapest first; none for a run that fits.

    More GPUs are asked for only where nothing else helps. Empty if that does not help either.
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
    """The first few that fit when planned in full, none that only adds to a quicker one."""
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
    """Estimated time of a step: its busiest pipeline rank's compute, the pipeline's ramp, traffic
    that compute waits for, and where speeds are measured what follows the pipeline.

    With t the time of one microbatch on that rank: M·t + (pp − 1)·t / vpp.
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
        return pipeline_seconds + plan.tail.seconds  # stages wait for their traffic already
    return pipeline_seconds + sum(t.seconds for t in plan.traffic if t.exposed)


def _search(run: Run, moves: Sequence[Move], trials: Trials) -> list[Candidate]:
    """Candidates that fit, from the first round that has some and the one after it."""
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
    """A value as the command line takes it."""
    match value:
        case Enum():
            return str(value.value)
        case tuple():
            return f"[{','.join(map(typed, value))}]"
        case str() if "|" in value:
            return f"'{value}'"  # a pipe to shells
        case bool() | None:
            return {True: "true", False: "false", None: "null"}[value]
        case _:
            return str(value)
