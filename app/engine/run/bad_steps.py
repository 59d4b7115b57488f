"""What follows a step whose loss or gradient norm is not finite: `train.on_bad_step`.

The optimizer has skipped its update, so parameters, moments, learning rate and Adam's count are
those of the step before. All ranks judge the same sums, and so come to the same end.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from app.choices import BadStep
from app.config import TrainConfig
from app.engine.report.metrics import StepReport
from app.optim.scale import LossScale

# exit code 65: the numbers are not finite, and going on as before would not change that
DIVERGED = os.EX_DATAERR


class Diverged(Exception):
    """Training has ended by itself, as on numbers that are not finite; the text says where and what
    is left.
    """


def is_bad(report: StepReport, loss_scale: LossScale | None) -> bool:
    """Whether a step's loss or gradient norm is not finite. An overflow that a smaller loss
    scale can mend is not bad.
    """
    if not math.isfinite(report.loss):
        return True
    falls = loss_scale is not None and loss_scale.config.loss_scale is None
    mends = loss_scale is not None and falls and loss_scale.scale > loss_scale.config.min_loss_scale
    return bool(report.skipped) and not mends


@dataclass(slots=True)
class BadSteps:
    """Counts them, and says what follows."""

    config: TrainConfig
    in_a_row: int = 0
    rollbacks: int = 0

    def rolls_back(self, report: StepReport, loss_scale: LossScale | None) -> bool:
        """Note a step; True: go back to a checkpoint. Raises Diverged where the run ends."""
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
