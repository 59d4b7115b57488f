"""What a grouped linear layer needs to know of experts that other ranks have replicas to this one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ReplicaWeight(Protocol):
    """Matrices of s experts of other ranks, whose rows lie behind those of the L experts here.

    Its methods are exchanges between the ranks of the expert group: all of them call the same ones
    in the same order. Nothing waits for the device.
    """

    def fetch(self) -> Tensor:
        """The matrices that are replicas, s × I × O, while those of this rank go to who borrows them;
        valid until a layer's next call for any kind that has been fetched before.
        """

    def grads(self) -> Tensor:
        """Where the gradients of what is replicas are to be written next: fp32, s × I × O."""

    def return_grads(self, total_LIO: Tensor) -> None:
        """Bring them home, and add what comes for experts of this rank to their sum."""
