"""All exchanges of clones through a transport, as the forwards and backwards of layers have them
and as no layer has them, against loops.

Shapes: R ranks · L experts of each, E of all · s slots of a rank, S of all · I × O a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from app.moe.clones.record import Clones


class Transport(Protocol):
    """Interface of transports of clones."""

    def gather_counts(self, counts_CE: Tensor) -> Tensor: ...

    def send(self, which: int, weights: Sequence[Tensor], clones: Clones) -> Tensor: ...

    def grads(self, which: int, clones: Clones) -> Tensor: ...

    def return_grads(self, which: int, total_LIO: Tensor, clones: Clones) -> None: ...


@dataclass(frozen=True)
class CloneSizes:
    """Sizes of one exchange; matrices of each kind."""

    local: int
    spares: int
    shapes: tuple[tuple[int, int], tuple[int, int]]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class CloneValues:
    """Values of all ranks, equal on each of them."""

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
PLANS = (True, False, True)  # whether the clones of that layer are any
Step = tuple[str, int, int]  # what is exchanged, of which kind or the first of both, in which layer


def steps() -> list[Step]:
    """Three layers, forward and backward; gradients alone, later than inputs; then three equal
    calls in a row.
    """
    layers = range(len(FACTORS))
    there: list[Step] = []
    for layer in layers:
        there += [("counts", 0, layer), ("weights", 0, layer)]
    for layer in reversed(layers):
        there += [("weights", 1, layer), ("gradients", 1, layer), ("gradients", 0, layer)]
    for layer in reversed(layers):
        there += [("weights", 1, layer)]
    for layer in reversed(layers):
        there += [("gradients", 1, layer), ("gradients", 0, layer)]
    rows = [
        (what, which, layer)
        for what in ("weights", "gradients", "counts")
        for which in (0, 1)
        for layer in layers
    ]
    return there + rows


def all_clone_exchanges(
    transport: Transport, sizes: CloneSizes, values: CloneValues, rank: int
) -> dict[str, Tensor]:
    """Return the results of each step, zero in empty slots, without a host sync."""
    found: dict[str, Tensor] = {}
    given = values.clones
    plans = [Clones(given.expert_S, given.moved_S * filled) for filled in PLANS]
    home = slice(rank * sizes.local, (rank + 1) * sizes.local)
    here = slice(rank * sizes.spares, (rank + 1) * sizes.spares)
    for nth, (what, which, layer) in enumerate(steps()):
        clones, factor, name = plans[layer], FACTORS[layer], f"{nth}: {what} {which} · {layer}"
        if what == "counts":
            counts_E = values.counts_RE[rank] * factor
            blocks_CE = torch.stack((counts_E // 3, counts_E % 7, counts_E - counts_E // 3))
            blocks_CE[2] -= blocks_CE[1]
            found[name] = transport.gather_counts(blocks_CE).clone()
        elif what == "weights":
            empty_S11 = clones.moved_S[here, None, None] == 0
            weights = [weight_EIO[home] * factor for weight_EIO in values.weights_EIO]
            for kind in (which, 1 - which):
                slots = transport.send(kind, weights, clones)
                found[f"{name}, {kind}"] = slots.masked_fill(empty_S11, 0)
        else:
            grads = transport.grads(which, clones)
            if PLANS[layer]:  # nothing is written for rows that are not there
                grads.copy_(values.grads_SIO[which][here] * factor)
            found[name] = values.totals_EIO[which][home] * factor
            transport.return_grads(which, found[name], clones)
    return found


def wanted_of_clones(sizes: CloneSizes, values: CloneValues, rank: int) -> dict[str, Tensor]:
    """Return the expected results by loops over the values of all ranks."""
    wanted: dict[str, Tensor] = {}
    experts, filled = values.clones.expert_S.tolist(), (values.clones.moved_S > 0).tolist()
    mine = range(rank * sizes.spares, (rank + 1) * sizes.spares)
    for nth, (what, which, layer) in enumerate(steps()):
        factor, name = FACTORS[layer], f"{nth}: {what} {which} · {layer}"
        if what == "counts":
            wanted[name] = values.counts_RE * factor
        elif what == "weights":
            for kind in (which, 1 - which):
                weight_EIO = values.weights_EIO[kind] * factor
                slots = [weight_EIO[experts[s]] * (filled[s] and PLANS[layer]) for s in mine]
                wanted[f"{name}, {kind}"] = torch.stack(slots)
        else:
            brought = values.totals_EIO[which].clone()
            for slot in range(len(experts)):
                if filled[slot] and PLANS[layer]:
                    brought[experts[slot]] += values.grads_SIO[which][slot]
            wanted[name] = brought[rank * sizes.local : (rank + 1) * sizes.local] * factor
    return wanted
