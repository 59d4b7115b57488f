"""Record of a microbatch's clones in one layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Clones:
    """Contents of the S = R·s slots of R ranks, on the device; slot j is on rank j // s. Compared
    by identity.
    """

    expert_S: Tensor  # int64: the expert in a slot; arbitrary if it is empty
    moved_S: Tensor  # int64: tokens that go there; 0 if it is empty
