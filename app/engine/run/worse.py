"""End a run whose validation loss no longer falls (`train.stop_after_worse`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class WorseInARow:
    """Validations in a row whose loss was not below the lowest one before."""

    most: int | None  # that end the run; None: any number may follow each other
    best: float = math.inf  # nats per token
    count: int = 0

    @classmethod
    def after(cls, most: int | None, losses: Iterable[float]) -> WorseInARow:
        """Return the count after earlier losses; a run that they had ended begins to count anew."""
        found = cls(most)
        for loss in losses:
            found.add(loss)
        if found.ends:
            found.count = 0
        return found

    def add(self, loss: float) -> None:
        """Count a validation; a loss that is not a number is no better."""
        if loss < self.best:
            self.best, self.count = loss, 0
        else:
            self.count += 1

    @property
    def ends(self) -> bool:
        """True if the run ends here."""
        return self.most is not None and self.count >= self.most
