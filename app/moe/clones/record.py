"""Which clones a microbatch has in one layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Clones:
    """What the S = R·s slots of R ranks have, on the device; slot j is on rank j // s. Equal to
    nothing but itself.
    """

    expert_S: Tensor  # int64: whose clone a slot has; any where it is empty
    moved_S: Tensor  # int64: tokens that go there; 0: it is empty
