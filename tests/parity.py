"""Results of a run after a few steps, compared with one process up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from app.config import Run
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups
from app.engine.step.engine import Engine
from app.planner.plan import Plan
from tests.distributed import run_distributed
from tests.rounding import Values, expect_alike, in_fp64
from tests.runs import engine_of, train_steps, whole_gradients, whole_parameters

NUMBERS = ("losses", "norms")
KINDS = (*NUMBERS, "gradients", "parameters")
Trained = dict[str, Values]  # of each kind: per step, or per parameter of the whole model


def results(engine: Engine, steps: int) -> Trained:
    """Losses and norms of a few steps, the last one's gradients, and the parameters after it."""
    losses, norms = zip(*train_steps(engine.plan.run, engine, steps), strict=True)
    whole = whole_gradients(engine), whole_parameters(engine)
    tensors = ({name: value.numpy() for name, value in found.items()} for found in whole)
    numbers = (dict(enumerate(values, start=1)) for values in (losses, norms))
    return dict(zip(KINDS, (*numbers, *tensors), strict=True))


def few_steps(rank: int, run: Run, steps: int) -> Trained:
    """Return the results of a fresh engine after some steps."""
    return results(engine_of(run, rank), steps)


def here(rank: int, run: Run, compute: Callable[[Engine], Any]) -> Any:
    """Compute with a fresh engine."""
    return compute(engine_of(run, rank))


def exactly(rank: int, run: Run, compute: Callable[[Engine], Any]) -> Any:
    """Compute with a fresh engine in fp64."""
    with exact_engine(rank, run) as engine:
        return compute(engine)


def alone(run: Run, compute: Callable[[Engine], Any]) -> tuple[Any, Any]:
    """Compute on one process, in fp32 and in fp64."""
    plain, exact = (run_distributed(train, 1, run, compute)[0] for train in (here, exactly))
    return plain, exact


@contextmanager
def exact_engine(rank: int, run: Run) -> Iterator[Engine]:
    """An engine that trains in fp64 within the block, from the initial weights of fp32."""
    plan = Plan(run)
    groups, device = create_groups(plan.layout, rank), torch.device("cpu")
    first = build_engine(plan, groups, device)  # weights are drawn in fp32
    with in_fp64():
        engine = build_engine(plan, groups, device)
        for wide, narrow in zip(engine.chunks, first.chunks, strict=True):
            for mine, value in zip(wide.parameters(), narrow.parameters(), strict=True):
                mine.data.copy_(value)
        yield engine


@dataclass(frozen=True)
class OneProcess:
    """Results of one process, in fp32 and in fp64."""

    plain: Trained
    exact: Trained

    @staticmethod
    def of(run: Run, steps: int, first: int = 0) -> OneProcess:
        """Train a run of one rank; keep losses and norms only of the steps after `first`."""
        found = alone(run, partial(results, steps=steps))
        for trained in found:
            for kind in NUMBERS:
                trained[kind] = {
                    step: value for step, value in trained[kind].items() if step > first
                }
        return OneProcess(*found)

    def expect(self, found: Trained, case: object = "") -> None:
        """`found` is the same training in another layout; what it lacks is not compared."""
        assert found.keys() >= set(NUMBERS)
        for kind, values in found.items():
            expect_alike(values, self.plain[kind], self.exact[kind], case=f"{case}: {kind}")
