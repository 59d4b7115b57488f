"""Handle steps whose loss or gradient norm is not finite, by `train.on_bad_step`.

The optimizer has skipped the update, so parameters, moments, learning rate and Adam's step count
are those of the step before. All ranks see the same all-reduced numbers, and so decide alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from app.choices import BadStep
from app.collectives import all_reduce
from app.config import TrainConfig
from app.engine.step.engine import Engine
from app.engine.step.records import StepReport
from app.errors import Diverged
from app.optim.scale import LossScale


def is_bad(report: StepReport, loss_scale: LossScale | None) -> bool:
    """Return whether a step's loss or gradient norm is not finite.

    An overflow that a lower dynamic loss scale can fix does not count.
    """
    if not math.isfinite(report.loss):
        return True
    falls = loss_scale is not None and loss_scale.config.loss_scale is None
    mends = loss_scale is not None and falls and loss_scale.scale > loss_scale.config.min_loss_scale
    return bool(report.skipped) and not mends


def state_is_finite(engine: Engine) -> bool:
    """Return whether parameters and moments of all ranks are finite; same on every rank."""
    param_shards = engine.optimizer.param_shards()
    values = (value for owned in param_shards for value in owned.state.values())
    bad = torch.stack([value.isfinite().logical_not().any() for value in values]).any().float()
    all_reduce(bad, engine.groups.world)
    return not bad


@dataclass(slots=True)
class BadSteps:
    """Counter of bad steps, which decides between skip, rollback and stop."""

    config: TrainConfig
    in_a_row: int = 0
    rollbacks: int = 0

    def rolls_back(self, report: StepReport, loss_scale: LossScale | None) -> bool:
        """Count a step; return True to roll back. Raises Diverged to end the run."""
        if not is_bad(report, loss_scale):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        match self.config.on_bad_step:
            case BadStep.skip if self.in_a_row < self.config.max_bad_steps:
                return False
            case BadStep.skip:
                raise Diverged(
                    f"{_numbers(report)}; {self.in_a_row} such steps in a row (train.max_bad_steps)"
                )
            case BadStep.stop:
                raise Diverged(f"{_numbers(report)} (train.on_bad_step=stop)")
        if self.rollbacks == self.config.max_rollbacks:
            raise Diverged(
                f"{_numbers(report)}, after {self.rollbacks} rollbacks (train.max_rollbacks)"
            )
        self.in_a_row = 0
        self.rollbacks = self.rollbacks + 1
        return True


def _numbers(report: StepReport) -> str:
    return f"step {report.step} has loss {report.loss:g} and gradient norm {report.grad_norm:g}"
