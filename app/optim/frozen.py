"""Parameters that are not trained: every rank has its whole block, in no buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.optim.buffers import ParamSpec

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class FrozenWeight:
    """A rank's block of a parameter, of which the `ranks` that hold the same block save a part
    each.
    """

    spec: ParamSpec
    rank: int
    ranks: int

    @property
    def start(self) -> int:
        """Return the first element of the block that a checkpoint fills."""
        return 0

    @property
    def main(self) -> Tensor:
        """Return the whole block, flat."""
        return self.spec.param.detach().view(-1)

    @property
    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint fills."""
        return {"main": self.main}

    @property
    def own(self) -> tuple[int, int]:
        """Return the range of the flattened block that this rank saves."""
        numel = self.spec.param.numel()
        return numel * self.rank // self.ranks, numel * (self.rank + 1) // self.ranks


def digests(weights: Iterable[FrozenWeight]) -> dict[str, int]:
    """Return, by name, sums of this rank's parts read as integers, whose total over all ranks, mod
    2⁶⁴, is the same in every layout.
    """
    found: dict[str, int] = {}
    for each in weights:
        if each.spec.counted:
            own = each.main[slice(*each.own)]
            total = int(own.view(INTEGERS[own.element_size()]).sum(dtype=torch.int64))
            found[each.spec.name] = found.get(each.spec.name, 0) + total
    return found


def together(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up the digests of all ranks."""
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = (total.get(name, 0) + value) % 2**64
    return total
