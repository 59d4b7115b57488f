"""Attention to sequences sharded over context-parallel ranks.

Shapes: as in `app.model.attention.modules`; C tokens of one of a rank's two chunks of a sequence
(`app.model.layers.layer_groups`), F values per token; D documents per sequence at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from app.choices import CpComm
from app.model.layers.attend import DocumentOffsets
from app.model.layers.layer_groups import (
    LayerGroups,
    gather_sequence,
    rank,
    size,
    ulysses_to_heads,
    ulysses_to_tokens,
)
from app.model.layers.layers import Context


def attend_all(
    q_BSNH: Tensor,
    k_BSGH: Tensor,
    v_BSGH: Tensor,
    context: Context,
    layer_groups: LayerGroups,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend to the whole sequence over all context-parallel ranks; returns B × S × N × H.

    `window` and `scale` are those of `Attend`.
    """
    attend = partial(context.attend, window=window, scale=scale)
    documents: Sequence[DocumentOffsets | None] = context.documents or [None] * 2
    if size(layer_groups.cp) == 1:
        return attend(q_BSNH, k_BSGH, v_BSGH, documents=documents[0])
    if layer_groups.cp_comm_type is CpComm.all_gather:
        return _attend_gathered_keys(
            q_BSNH, k_BSGH, v_BSGH, attend=attend, documents=documents, layer_groups=layer_groups
        )
    attend = partial(attend, documents=documents[0])
    return _attend_by_heads(q_BSNH, k_BSGH, v_BSGH, attend=attend, layer_groups=layer_groups)


def attended_heads(heads: int, layer_groups: LayerGroups) -> slice:
    """Return which of a rank's query heads it attends with in `attend_all`."""
    if size(layer_groups.cp) == 1 or layer_groups.cp_comm_type is CpComm.all_gather:
        return slice(heads)
    each = heads // size(layer_groups.cp)
    first = rank(layer_groups.cp) * each
    return slice(first, first + each)


def documents_of_calls(
    ends_BD: Tensor, length: int, layer_groups: LayerGroups
) -> list[DocumentOffsets]:
    """Return the documents of each call of `Attend` in `attend_all`, in order.

    ends_BD: ends of documents in whole sequences of `length` tokens, padded with `length`.
    """
    if size(layer_groups.cp) == 1 or layer_groups.cp_comm_type is CpComm.all_to_all:
        return [DocumentOffsets.of(ends_BD, length, length)]
    piece = length // (2 * size(layer_groups.cp))
    return [
        DocumentOffsets.of(ends_BD, piece, (number + 1) * piece)
        for number in _chunks_here(layer_groups)
    ]


def _chunks_here(layer_groups: LayerGroups) -> tuple[int, int]:
    """Return the numbers of this rank's two chunks of a sequence."""
    here = rank(layer_groups.cp)
    return here, 2 * size(layer_groups.cp) - 1 - here


def _attend_gathered_keys(
    q_BSNH: Tensor,
    k_BSGH: Tensor,
    v_BSGH: Tensor,
    attend: Callable[..., Tensor],
    documents: Sequence[DocumentOffsets | None],
    layer_groups: LayerGroups,
) -> Tensor:
    """Attend with both chunks of the queries, each to the gathered keys up to its own end."""
    assert layer_groups.cp is not None
    both_BKF = gather_sequence(torch.cat((k_BSGH, v_BSGH), dim=2).flatten(2), layer_groups.cp)
    k_BKGH, v_BKGH = both_BKF.unflatten(2, (-1, k_BSGH.shape[3])).chunk(2, dim=2)
    outs = []
    piece = q_BSNH.shape[1] // 2
    calls = zip(q_BSNH.chunk(2, dim=1), documents, _chunks_here(layer_groups), strict=True)
    for q_BCNH, each, number in calls:
        end = (number + 1) * piece
        outs.append(attend(q_BCNH, k_BKGH[:, :end], v_BKGH[:, :end], documents=each))
    return torch.cat(outs, dim=1)


def _attend_by_heads(
    q_BSNH: Tensor,
    k_BSGH: Tensor,
    v_BSGH: Tensor,
    attend: Callable[..., Tensor],
    layer_groups: LayerGroups,
) -> Tensor:
    """Attend within whole sequences for this rank's share of the heads (Ulysses)."""
    assert layer_groups.cp is not None
    ranks = size(layer_groups.cp)
    width = q_BSNH.shape[3]
    shares = [heads.unflatten(2, (ranks, -1)) for heads in (q_BSNH, k_BSGH, v_BSGH)]
    whole_BKF = ulysses_to_heads(torch.cat(shares, dim=3).flatten(3), layer_groups.cp)
    heads = [share.shape[3] for share in shares]
    q_BKNH, k_BKGH, v_BKGH = whole_BKF.unflatten(2, (-1, width)).split(heads, dim=2)
    out_BKNH = attend(q_BKNH, k_BKGH, v_BKGH)
    own_BSF = ulysses_to_tokens(out_BKNH.flatten(2), layer_groups.cp).flatten(2)
    own_BSNH: Tensor = own_BSF.unflatten(2, (-1, width))
    return own_BSNH
