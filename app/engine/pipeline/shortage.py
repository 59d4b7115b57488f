"""What follows when a rank's experts had no memory for all rows that routers chose
(`model.moe.static.capacity=factor`): the work is done again, and memory grows.

Work that lacked rows has computed nothing that may be used: its update is left out, or its loss
not looked at. It is done again eagerly, with as many rows as it takes; the results are those of
memory for all rows, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from app.choices import StaticOverflow
from app.config import Run
from app.engine.build import Engine
from app.engine.run.bad_steps import Diverged
from app.errors import warn
from app.moe.dispatch.static import StaticDispatcher
from app.plan.dispatchers.choose import run_dispatcher, tokens_per_rank, with_rows
from app.plan.dispatchers.static import HEADROOM, PlannedStatic
from app.plan.plan import Plan

IN_A_ROW = 2  # steps that lacked rows, after which it grows


class RowShortage:
    """Watches the rows of one rank's experts over a step or a validation."""

    def __init__(self, engine: Engine, dispatcher: StaticDispatcher) -> None:
        self.run = engine.plan.run
        self.dispatcher = dispatcher
        self.world = engine.groups.world
        self.device = engine.device
        self.in_a_row = 0  # steps so far that lacked rows
        self._needed = 0.0  # by those, over the mean
        self._random: list[Tensor] = []  # states of the generators before the work
        self._lacked = self.missing.clone()  # when work was done again last

    @classmethod
    def of(cls, engine: Engine) -> RowShortage | None:
        """None: there is memory for all rows that experts can be asked for."""
        dispatcher = engine.dispatcher
        if not isinstance(dispatcher, StaticDispatcher):
            return None
        tokens = tokens_per_rank(engine.plan.run)
        return cls(engine, dispatcher) if dispatcher.planned.may_lack_rows(tokens) else None

    @property
    def missing(self) -> Tensor:
        """int32 [1]: most rows that a microbatch lacks here, of the work that is being done."""
        return self.dispatcher.missing

    def begin(self) -> None:
        """Work begins, which might have to be done again."""
        self.missing.zero_()
        self._random = [torch.get_rng_state()]
        if self.device.type == "cuda":
            self._random.append(torch.cuda.get_rng_state(self.device))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within the block the work that has begun last is done again, with all rows."""
        self._lacked = self.missing.clone()
        self.missing.zero_()
        cpu, *cuda = self._random
        torch.set_rng_state(cpu)
        for state in cuda:
            torch.cuda.set_rng_state(state, self.device)
        with self.dispatcher.all_rows():
            yield

    def grows(self, lacked: bool) -> bool:
        """Note a step, and whether it lacked rows on any rank. True: rows of all ranks' experts are
        more from now on, and what was captured has to be captured anew.

        Raises Diverged where the run is to end.
        """
        if not lacked:
            self.in_a_row = 0
            self._needed = 0.0
            return False
        self.in_a_row += 1
        self._needed = max(self._needed, self._rows_needed())
        if self.in_a_row < IN_A_ROW:
            return False
        factor = math.ceil(100 * HEADROOM * self._needed) / 100
        static = self.dispatcher.planned.moe.static
        what = (
            f"model.moe.static.factor={static.factor}: {IN_A_ROW} steps in a row needed up to "
            f"{self._needed:.2f} times the mean number of rows"
        )
        self.in_a_row = 0
        self._needed = 0.0
        if static.on_overflow is StaticOverflow.stop:
            raise Diverged(f"{what} (model.moe.static.on_overflow=stop)")
        grown = with_rows(self.run, factor)
        if not self._fits(grown):
            self._tell(f"{what}, and there is no memory for {factor} times: steps are taken again")
            return False
        planned = run_dispatcher(grown)
        assert isinstance(planned, PlannedStatic)
        self.dispatcher.planned = planned
        self._tell(f"{what}; from now on there is memory for {factor} times")
        return True

    def _rows_needed(self) -> float:
        """By the work that was done again last, over the mean, on the rank that needed most."""
        planned = self.dispatcher.planned
        tokens = tokens_per_rank(self.run)
        rows = self._lacked.clamp(min=0).double() + planned.rows(tokens).computed
        if self.world.size() > 1:
            dist.all_reduce(rows, dist.ReduceOp.MAX, self.world)
        return float(rows) / planned.mean_rows(tokens)

    def _fits(self, grown: Run) -> bool:
        """Whether the GPU has memory for it, by its plan."""
        if self.device.type != "cuda":
            return True
        plan = Plan(grown)
        if grown.hardware.gpu_memory_gib is not None:
            return plan.fits
        return plan.busiest.total <= torch.cuda.get_device_properties(self.device).total_memory

    def _tell(self, text: str) -> None:
        if self.world.rank() == 0:
            warn(text)
