"""The factor on the loss that keeps small gradients out of underflow (Micikevicius et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from app.choices import Dtype
from app.config import PrecisionConfig


class LossScaleState(TypedDict):
    """What a checkpoint holds of a `LossScale`."""

    scale: float
    clean: int
    tolerated: int


@dataclass(slots=True)
class LossScale:
    """A scale that falls when gradients overflow, and rises after a long time without.

    `value` is a device scalar, so that what reads it can be captured once; the counters live on the
    host, which learns about an overflow with the other facts of a step.
    """

    config: PrecisionConfig
    value: Tensor  # fp32
    scale: float  # the same number on the host
    clean: int = 0  # steps without an overflow since the last rise or overflow
    tolerated: int = 0  # overflows until the scale falls

    @classmethod
    def start(cls, config: PrecisionConfig, device: torch.device) -> LossScale | None:
        """The scale of a new run; None where none is needed."""
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
        """Follow one step. A constant scale stays.

        An overflow takes one of `loss_scale_hysteresis` chances, and without any left halves the
        scale, each time anew, down to `min_loss_scale`; `loss_scale_window` clean steps double it
        and give all chances back.
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
        """What a checkpoint holds."""
        return {"scale": self.scale, "clean": self.clean, "tolerated": self.tolerated}

    def load(self, state: LossScaleState) -> None:
        """Go on from a checkpoint within this run's bounds; a constant scale stays."""
        if self.config.loss_scale is not None:
            return
        self.clean = state["clean"]
        self.tolerated = min(state["tolerated"], self.config.loss_scale_hysteresis)
        self._set(max(state["scale"], self.config.min_loss_scale))
