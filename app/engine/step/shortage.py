"""Rerun a step whose experts lacked memory for their dispatched tokens, and grow the memory.

Memory may lack for the tokens themselves (`model.moe.static.capacity=factor`), or for saving them
for backward (`static.paged_buffer`). The results of such a step are invalid: its update is skipped,
or the loss of a validation ignored. The work is rerun eagerly with memory for all tokens; results
are bit for bit those of a run that always had enough.

"Rows" here are those of the experts' input matrix: one per dispatched token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from app.choices import StaticOverflow
from app.config import Run
from app.engine.ranks.memory import fits
from app.engine.step.engine import Engine
from app.errors import Diverged, warn
from app.moe.dispatch.static import StaticDispatcher
from app.plan.parts.dispatcher import run_dispatcher, tokens_per_rank, with_rows
from app.plan.parts.paged_buffer import planned_paged_buffer, with_paged_buffer
from app.plan.parts.static import HEADROOM, PlannedStatic

IN_A_ROW = 2  # successive steps that lacked rows, after which memory grows


class RowShortage:
    """Handler of capacity overflow on one rank: detects missing expert rows in a step or a
    validation, reruns it, and grows memory.
    """

    def __init__(self, engine: Engine, dispatcher: StaticDispatcher) -> None:
        self.run = engine.plan.run
        self.engine = engine
        self.dispatcher = dispatcher
        self.paging = engine.paging
        self.world = engine.groups.world
        self.device = engine.device
        self.in_a_row = 0  # successive steps so far that lacked rows
        self._needed = 0.0, 0.0  # by these steps: rows over the mean, pages over those available
        self._random: list[Tensor] = []  # RNG states before the work
        self._demand_2 = self._measure()  # of the last work that was rerun

    @classmethod
    def of(cls, engine: Engine) -> RowShortage | None:
        """Build it for an engine; None if experts always have memory for all rows."""
        dispatcher = engine.static
        if dispatcher is None:
            return None
        tokens = tokens_per_rank(engine.plan.run)
        return cls(engine, dispatcher) if dispatcher.planned.may_lack_rows(tokens) else None

    def lacks(self) -> Tensor:
        """Return a device bool scalar: this rank lacks rows, or memory to save them."""
        lacking = self.dispatcher.lacks()
        return (lacking if self.paging is None else lacking | self.paging.paged_buffer.lacks())[0]

    def begin(self) -> None:
        """Start work that may have to be rerun: record RNG states."""
        self._clear()
        self._random = [torch.get_rng_state()]
        if self.device.type == "cuda":
            self._random.append(torch.cuda.get_rng_state(self.device))

    def _clear(self) -> None:
        self.dispatcher.clear()
        if self.paging is not None:
            self.paging.paged_buffer.clear()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Rerun, within the block, the work started last, with memory for all rows."""
        self._demand_2 = self._measure()
        self._clear()
        cpu, *cuda = self._random
        torch.set_rng_state(cpu)
        for state in cuda:
            torch.cuda.set_rng_state(state, self.device)
        with self.dispatcher.all_rows():
            yield

    def grows(self, lacked: bool) -> bool:
        """Count a step, which `lacked` rows on some rank or not; return whether memory grew.

        Memory then grew on all ranks, and CUDA graphs must be captured again. Raises Diverged with
        on_overflow=stop.
        """
        if not lacked:
            self.in_a_row = 0
            self._needed = 0.0, 0.0
            return False
        self.in_a_row += 1
        rows, pages = self._demand()
        self._needed = max(rows, self._needed[0]), max(pages, self._needed[1])
        if self.in_a_row < IN_A_ROW:
            return False
        self.in_a_row = 0
        more = self._enough()
        what = (
            f"{more.key}={more.now}: {IN_A_ROW} steps in a row needed up to "
            f"{more.needed:.2f} times the mean"
        )
        if self.dispatcher.planned.moe.static.on_overflow is StaticOverflow.stop:
            raise Diverged(f"{what} (model.moe.static.on_overflow=stop)")
        if not fits(more.run, self.device):
            self._tell(
                f"{what}, and there is no memory for {more.wanted} times: steps that need more are "
                "rerun as before"
            )
            return False
        self._grow(more.run)
        self._tell(f"{what}; from now on there is memory for {more.wanted} times")
        return True

    def _grow(self, run: Run) -> None:
        planned = run_dispatcher(run)
        assert isinstance(planned, PlannedStatic)
        self.run = run
        self.dispatcher.planned = planned
        if self.paging is not None:
            plan, rank = self.engine.plan, self.engine.groups.pp_rank
            again = planned_paged_buffer(run, plan.stages.stages[rank], plan.actions[rank])
            assert again is not None, "the run has a paged buffer"
            self.paging.paged_buffer.resize(again)

    def _demand(self) -> tuple[float, float]:
        """Return the largest demand of any rank in the last rerun work.

        It is (rows over the mean, pages over those available).
        """
        if self.world.size() > 1:
            dist.all_reduce(self._demand_2, dist.ReduceOp.MAX, self.world)
        rows, pages = self._demand_2.tolist()
        return rows, pages

    def _measure(self) -> Tensor:
        """Measure the demand of this rank as in `_demand`: fp64 [2]."""
        dispatcher = self.dispatcher
        tokens = tokens_per_rank(self.run)
        held = dispatcher.planned.rows(tokens).computed
        rows = (dispatcher.missing.clamp(min=0).double() + held) / (
            dispatcher.planned.mean_rows(tokens)
        )
        if self.paging is None:
            return torch.cat((rows, torch.zeros_like(rows)))
        paged = self.paging.paged_buffer
        pages = paged.needed().double() / paged.planned.pages
        return torch.cat((rows, pages))

    def _enough(self) -> _More:
        """Return a run with memory for the demand so far, plus headroom."""
        static = self.dispatcher.planned.moe.static
        tokens = tokens_per_rank(self.run)
        planned = self.dispatcher.planned
        held = planned.rows(tokens).computed / planned.mean_rows(tokens)
        rows, pages = self._needed
        self._needed = 0.0, 0.0
        run, found = self.run, None
        if static.paged_buffer is not None and pages > 1:
            needed = static.paged_buffer * pages
            run = with_paged_buffer(run, _with_headroom(needed))
            key = "model.moe.static.paged_buffer"
            found = _More(
                run, key, static.paged_buffer, needed=needed, wanted=_with_headroom(needed)
            )
        if rows > held:
            run = with_rows(run, _with_headroom(rows))
            key = "model.moe.static.factor"
            found = _More(run, key, static.factor, needed=rows, wanted=_with_headroom(rows))
        assert found is not None, "rows or pages were missing"
        return found

    def _tell(self, text: str) -> None:
        if self.world.rank() == 0:
            warn(text)


@dataclass(frozen=True, slots=True)
class _More:
    """Run with more memory, and the key that was raised."""

    run: Run
    key: str
    now: float  # the key's value so far
    needed: float  # relative to the mean
    wanted: float  # the key's value in `run`


def _with_headroom(needed: float) -> float:
    """Return the need with headroom, rounded up to two decimals."""
    return math.ceil(100 * HEADROOM * needed) / 100
