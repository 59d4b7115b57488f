"""What dispatchers know of an exchange of tokens with experts, as frozen records that travel
between the phases of a layer.

Shapes: E or L experts of this rank, P ranks of the exchange, R rows on this rank after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from app.moe.permute import Permutation


@dataclass(frozen=True, slots=True)
class AllToAllCounts:
    """What preprocessing learned on the device: the exchange but for the numbers that only the
    host can act on.
    """

    permutation: Permutation  # this rank's rows by expert of the whole layer, hence by destination
    sizes_2P: Tensor  # rows to each rank, and from each
    here_PL: Tensor  # rows from each rank for each of this rank's experts
    ends_E: Tensor  # int32 end offset of each of this rank's experts


@dataclass(frozen=True, slots=True)
class AllToAllExchange:
    """How this rank's rows leave, how foreign rows arrive and are grouped by expert."""

    permutation: Permutation  # this rank's rows by expert of the whole layer, hence by destination
    sent: tuple[int, ...]  # rows to each rank
    received: tuple[int, ...]  # rows from each rank
    order_R: Tensor  # received rows (source-major) in expert-major order
    inverse_R: Tensor  # and back
    ends_E: Tensor  # int32 end offset of each of this rank's experts


@dataclass(frozen=True, slots=True)
class Uncounted:
    """A permutation of which only the device knows how many rows it has."""

    permutation: Permutation


# What `preprocess` has found out, for the `dispatch` of the same dispatcher.
Prepared = Permutation | AllToAllCounts | Uncounted | AllToAllExchange
# What `dispatch` has found out besides, for the experts (`ends_E`) and for `combine`.
Dispatched = Permutation | AllToAllExchange
