"""A weight in eight bits, beside the parameter that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from app.model.fp8.quantised import Quantised


class QuantisesWeights(Protocol):
    """What makes a weight's copies in eight bits."""

    def weight(self, weight: Tensor, /) -> Quantised:
        """In new memory, for the output and for the gradient of the input."""

    def update_weight(self, weight: Tensor, held: Quantised, /) -> None:
        """The same in the memory of `held`, which `weight` has made."""


class HeldWeight:
    """What layers in eight bits share: the weight is quantised once per update, in memory that
    never moves, so that captured graphs read what it holds now.

    `counted` looks at the copies whenever they are new; None: nobody does.
    """

    def __init__(
        self,
        quantises: QuantisesWeights,
        weight: nn.Parameter,
        counted: Callable[[Quantised], None] | None = None,
    ) -> None:
        self._quantises = quantises
        self.weight = weight
        self._counted = counted
        with torch.no_grad():
            self.held = quantises.weight(weight)
        self.stale = True  # the weight has changed since
        self.times = 0  # that the weight has been quantised since

    def refresh(self) -> None:
        """Quantise the weight, if it has changed."""
        if self.stale:
            with torch.no_grad():
                self._quantises.update_weight(self.weight, self.held)
            if self._counted is not None:
                self._counted(self.held)
            self.stale = False
            self.times += 1
