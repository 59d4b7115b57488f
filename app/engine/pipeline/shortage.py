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
from app.engine.build import Engine
from app.errors import ConfigError, warn
from app.moe.dispatch.static import StaticDispatcher
from app.plan.dispatchers.choose import run_dispatcher, tokens_per_rank, with_rows
from app.plan.dispatchers.static import PlannedStatic
from app.plan.plan import Plan

HEADROOM = 1.1  # of memory that grows, over what was needed
IN_A_ROW = 2  # steps that lacked rows, after which it grows


class RowShortage:
    """Watches the rows of one rank's experts over a step or a validation."""

    def __init__(self, engine: Engine, dispatcher: StaticDispatcher) -> None:
        self.run = engine.plan.run
        self.dispatcher = dispatcher
        self.world = engine.groups.world
        self.device = engine.device
        self.in_a_row = 0  # steps so far
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

        Raises ConfigError where the run is to end, or has no memory for more.
        """
        self.in_a_row = self.in_a_row + 1 if lacked else 0
        if self.in_a_row < IN_A_ROW:
            return False
        self.in_a_row = 0
        now = self.dispatcher.planned.moe.static.factor
        factor = self._factor_needed(now)
        rule = f"{IN_A_ROW} steps in a row needed up to {factor / HEADROOM:.2f} times the mean"
        key = "model.moe.static.factor"
        if self.dispatcher.planned.moe.static.on_overflow is StaticOverflow.stop:
            rule = f"{rule} (model.moe.static.on_overflow=stop)"
            raise ConfigError(key, now, rule, nearest=factor)
        grown = with_rows(self.run, factor)
        if self.device.type == "cuda" and not Plan(grown).fits:
            raise ConfigError(key, now, f"{rule}, and there is no memory for factor={factor}")
        planned = run_dispatcher(grown)
        assert isinstance(planned, PlannedStatic)
        self.dispatcher.planned = planned
        if self.world.rank() == 0:
            warn(f"{key}={now}: {rule}; from now on there is memory for {factor} times")
        return True

    def _factor_needed(self, now: float) -> float:
        """Rows over the mean that would have been enough on every rank, and some more."""
        tokens = tokens_per_rank(self.run)
        share = self._lacked.double() / self.dispatcher.planned.mean_rows(tokens)
        if self.world.size() > 1:
            dist.all_reduce(share, dist.ReduceOp.MAX, self.world)
        return math.ceil(100 * HEADROOM * (now + float(share))) / 100
