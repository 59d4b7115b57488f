"""Interface through which a grouped linear layer computes replicas of remote experts."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ReplicaWeight(Protocol):
    """Weights I × O of s replicas of remote experts; their rows follow those of this rank's L
    experts.

    The methods communicate within the expert group: all its ranks call the same ones in the same
    order. None synchronizes with the device.
    """

    def fetch(self) -> Tensor:
        """Return the replicas' matrices, s × I × O, and send this rank's to the ranks that
        replicate them.

        Valid until a layer's next call for any kind of matrix that has been fetched before.
        """

    def grads(self) -> Tensor:
        """Return the buffer for the replicas' gradients: fp32, s × I × O."""

    def return_grads(self, total_LIO: Tensor) -> None:
        """Send the gradients to the experts' owner ranks and add those that arrive to
        `total_LIO`.
        """
