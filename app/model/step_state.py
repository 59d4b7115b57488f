"""Interface of state that a feature keeps per step, beside parameters and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor


class StepState:
    """State that must know where a step begins and ends; a run builds those of its features only.

    Each method does nothing unless overridden. All but `stepped` only launch device work, and may
    be captured.
    """

    @property
    def capturable(self) -> bool:
        """True if every later step launches the same kernels as this one."""
        return True

    def start_step(self) -> None:
        """Prepare for the first forward of a step, or of its rerun."""

    def sums(self) -> Mapping[str, Tensor]:
        """Return scalars of this step by field of `StepFacts`, to be summed over all ranks."""
        return {}

    def finish_step(self, skipped: Tensor) -> None:
        """Run the work that follows the update; `skipped` is 1 if it was skipped, else 0."""

    def stepped(self, skipped: bool) -> None:
        """Note on the host whether the update was skipped."""

    def on_trial(self) -> AbstractContextManager[None]:
        """Return a context for running layers outside of any step, to capture them."""
        return nullcontext()
