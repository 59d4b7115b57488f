"""All exchanges of clones through a transport, as the forwards and backwards of two layers have
them and as no layer has them, against loops.

Shapes: R ranks · L experts of each, E of all · s slots of a rank, S of all · I × O a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from app.moe.clones.record import Clones


class Transport(Protocol):
    """What carries clones."""

    def gather_counts(self, counts_E: Tensor) -> Tensor: ...

    def send(self, which: int, weight_LIO: Tensor, clones: Clones) -> Tensor: ...

    def grads(self, which: int) -> Tensor: ...

    def add_home(self, which: int, total_LIO: Tensor, clones: Clones) -> None: ...


@dataclass(frozen=True)
class CloneSizes:
    """Of one exchange; matrices of each kind."""

    local: int
    spares: int
    shapes: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class CloneValues:
    """Of all ranks, the same on each of them."""

    clones: Clones
    counts_RE: Tensor
    weights_EIO: tuple[Tensor, ...]  # of each kind
    grads_SIO: tuple[Tensor, ...]
    totals_EIO: tuple[Tensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in one order."""
        kinds = *self.weights_EIO, *self.grads_SIO, *self.totals_EIO
        return [self.clones.expert_S, self.clones.moved_S, self.counts_RE, *kinds]

    def copy_(self, other: CloneValues) -> None:
        """Take another's values."""
        for ours, theirs in zip(self.tensors, other.tensors, strict=True):
            ours.copy_(theirs)


def draw_values(sizes: CloneSizes, ranks: int, seed: int, device: str = "cpu") -> CloneValues:
    """Random; the first slot of every rank is filled and half of the others, as a rule with experts
    of other ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    slots, experts = ranks * sizes.spares, ranks * sizes.local

    def normal(count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(
            torch.randn(count, *shape, generator=generator).to(device, dtype)
            for shape in sizes.shapes
        )

    distance_S = torch.randint(
        sizes.local, max(experts, 1 + sizes.local), (slots,), generator=generator
    )
    expert_S = (torch.arange(slots) // sizes.spares * sizes.local + distance_S) % experts
    filled_S = torch.rand(slots, generator=generator) < 1 / 2
    filled_S[:: sizes.spares] = True
    counts_RE = torch.randint(0, 1 << 40, (ranks, experts), generator=generator)
    return CloneValues(
        Clones(expert_S.to(device), (7 * filled_S).to(device)),
        counts_RE.to(device),
        weights_EIO=normal(experts, sizes.dtype),
        grads_SIO=normal(slots, torch.float32),
        totals_EIO=normal(experts, torch.float32),
    )


FACTORS = (1, 2, 4)  # what multiplies values of one layer or call: exact
Step = tuple[str, int, int]  # what is exchanged, of which kind, times what


def steps(kinds: int) -> list[Step]:
    """Two layers, forward and backward; then three equal calls in a row."""
    layers: list[Step] = []
    for factor in FACTORS[:2]:
        layers += [("counts", 0, factor), *(("weights", which, factor) for which in range(kinds))]
    for factor in reversed(FACTORS[:2]):
        for which in reversed(range(kinds)):
            layers += [("weights", which, factor), ("gradients", which, factor)]
    rows = [
        (what, which, factor)
        for what in ("weights", "gradients", "counts")
        for which in range(kinds)
        for factor in FACTORS
    ]
    return layers + rows


def all_clone_exchanges(
    transport: Transport, sizes: CloneSizes, values: CloneValues, rank: int
) -> dict[str, Tensor]:
    """What each step brings, zero in empty slots; never waits for the device."""
    found: dict[str, Tensor] = {}
    clones = values.clones
    home = slice(rank * sizes.local, (rank + 1) * sizes.local)
    here = slice(rank * sizes.spares, (rank + 1) * sizes.spares)
    empty_S11 = clones.moved_S[here, None, None] == 0
    for nth, (what, which, factor) in enumerate(steps(len(sizes.shapes))):
        if what == "counts":
            brought = transport.gather_counts(values.counts_RE[rank] * factor).clone()
        elif what == "weights":
            weight_LIO = values.weights_EIO[which][home] * factor
            brought = transport.send(which, weight_LIO, clones).masked_fill(empty_S11, 0)
        else:
            transport.grads(which).copy_(values.grads_SIO[which][here] * factor)
            brought = values.totals_EIO[which][home] * factor
            transport.add_home(which, brought, clones)
        found[f"{nth}: {what} {which} · {factor}"] = brought
    return found


def wanted_of_clones(sizes: CloneSizes, values: CloneValues, rank: int) -> dict[str, Tensor]:
    """The same by loops over the values of all ranks."""
    wanted: dict[str, Tensor] = {}
    experts, filled = values.clones.expert_S.tolist(), (values.clones.moved_S > 0).tolist()
    for nth, (what, which, factor) in enumerate(steps(len(sizes.shapes))):
        if what == "counts":
            brought = values.counts_RE
        elif what == "weights":
            slots = range(rank * sizes.spares, (rank + 1) * sizes.spares)
            weight_EIO = values.weights_EIO[which]
            brought = torch.stack([weight_EIO[experts[slot]] * filled[slot] for slot in slots])
        else:
            brought = values.totals_EIO[which].clone()
            for slot in range(len(experts)):
                if filled[slot]:
                    brought[experts[slot]] += values.grads_SIO[which][slot]
            brought = brought[rank * sizes.local : (rank + 1) * sizes.local]
        wanted[f"{nth}: {what} {which} · {factor}"] = brought * factor
    return wanted
