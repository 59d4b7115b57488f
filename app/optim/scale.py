"""Loss scale that keeps small gradients from underflowing (Micikevicius et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from app.choices import Dtype
from app.config import PrecisionConfig


class LossScaleState(TypedDict):
    """State of a `LossScale` in a checkpoint."""

    scale: float
    clean: int
    tolerated: int


@dataclass(slots=True)
class LossScale:
    """Scale that falls when gradients overflow, and rises after many steps without overflow.

    `value` is a device scalar, so that work that reads it can be captured once; the counters live
    on the host, which learns of an overflow with the step's other results.
    """

    config: PrecisionConfig
    value: Tensor  # fp32
    scale: float  # the same number on the host
    clean: int = 0  # steps without an overflow since the last rise or overflow
    tolerated: int = 0  # overflows until the scale falls

    @classmethod
    def start(cls, config: PrecisionConfig, device: torch.device) -> LossScale | None:
        """Return the scale of a new run; None if none is needed."""
        scale = config.loss_scale
        if scale is None:
            if config.params is not Dtype.float16:
                return None
            scale = config.initial_loss_scale
        return cls(
            config,
            torch.full((), scale, device=device),
            scale,
            tolerated=config.loss_scale_hysteresis,
        )

    def update(self, overflow: bool) -> None:
        """Update the scale after one step; a constant scale is unchanged.

        An overflow uses up one of `loss_scale_hysteresis` chances; with none left, every overflow
        halves the scale, down to `min_loss_scale`. `loss_scale_window` clean steps double it and
        restore all chances.
        """
        if self.config.loss_scale is not None:
            return
        if overflow:
            self.clean = 0
            self.tolerated = self.tolerated - 1
            if self.tolerated <= 0:
                self._set(max(self.scale * 0.5, self.config.min_loss_scale))
            return
        self.clean += 1
        if self.clean >= self.config.loss_scale_window:  # above it: resumed with a shorter window
            self.clean = 0
            self.tolerated = self.config.loss_scale_hysteresis
            self._set(self.scale * 2.0)

    def _set(self, scale: float) -> None:
        self.scale = scale
        self.value.fill_(scale)

    def state(self) -> LossScaleState:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "clean": self.clean, "tolerated": self.tolerated}

    def load(self, state: LossScaleState) -> None:
        """Resume from a checkpoint within this run's bounds; a constant scale is unchanged."""
        if self.config.loss_scale is not None:
            return
        self.clean = state["clean"]
        self.tolerated = min(state["tolerated"], self.config.loss_scale_hysteresis)
        self._set(max(state["scale"], self.config.min_loss_scale))
