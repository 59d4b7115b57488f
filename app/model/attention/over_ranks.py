"""Attention to sequences sharded over context-parallel ranks.

Shapes: as in `app.model.attention.modules`; C tokens of one of a rank's two chunks of a sequence
(`app.model.layers.layer_groups`), F values per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.choices import CpComm
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
    scale: float | None = None,
) -> Tensor:
    """Attend to the whole sequence over all context-parallel ranks; returns B × S × N × H.

    `scale`: factor on the scores; None means 1 / √H.
    """
    if size(layer_groups.cp) == 1:
        return context.attend(q_BSNH, k_BSGH, v_BSGH, mask_B1SK=context.mask_B1SK, scale=scale)
    by = (
        _attend_gathered_keys
        if layer_groups.cp_comm_type is CpComm.all_gather
        else _attend_by_heads
    )
    return by(q_BSNH, k_BSGH, v_BSGH, context=context, layer_groups=layer_groups, scale=scale)


def _attend_gathered_keys(
    q_BSNH: Tensor,
    k_BSGH: Tensor,
    v_BSGH: Tensor,
    context: Context,
    layer_groups: LayerGroups,
    scale: float | None,
) -> Tensor:
    """Attend with both chunks of the queries, each to the gathered keys up to its own end."""
    assert layer_groups.cp is not None
    ranks = size(layer_groups.cp)
    here = rank(layer_groups.cp)
    both_BKF = gather_sequence(torch.cat((k_BSGH, v_BSGH), dim=2).flatten(2), layer_groups.cp)
    k_BKGH, v_BKGH = both_BKF.unflatten(2, (-1, k_BSGH.shape[3])).chunk(2, dim=2)
    outs = []
    piece = q_BSNH.shape[1] // 2
    masks = (None, None) if context.mask_B1SK is None else context.mask_B1SK.chunk(2, dim=2)
    numbers = (here, 2 * ranks - 1 - here)
    for q_BCNH, mask, number in zip(q_BSNH.chunk(2, dim=1), masks, numbers, strict=True):
        end = (number + 1) * piece
        seen = None if mask is None else mask[..., :end]
        outs.append(
            context.attend(q_BCNH, k_BKGH[:, :end], v_BKGH[:, :end], mask_B1SK=seen, scale=scale)
        )
    return torch.cat(outs, dim=1)


def _attend_by_heads(
    q_BSNH: Tensor,
    k_BSGH: Tensor,
    v_BSGH: Tensor,
    context: Context,
    layer_groups: LayerGroups,
    scale: float | None,
) -> Tensor:
    """Attend within whole sequences for this rank's share of the heads (Ulysses)."""
    assert layer_groups.cp is not None
    ranks = size(layer_groups.cp)
    width = q_BSNH.shape[3]
    shares = [heads.unflatten(2, (ranks, -1)) for heads in (q_BSNH, k_BSGH, v_BSGH)]
    whole_BKF = ulysses_to_heads(torch.cat(shares, dim=3).flatten(3), layer_groups.cp)
    heads = [share.shape[3] for share in shares]
    q_BKNH, k_BKGH, v_BKGH = whole_BKF.unflatten(2, (-1, width)).split(heads, dim=2)
    out_BKNH = context.attend(q_BKNH, k_BKGH, v_BKGH, mask_B1SK=context.mask_B1SK, scale=scale)
    own_BSF = ulysses_to_tokens(out_BKNH.flatten(2), layer_groups.cp).flatten(2)
    own_BSNH: Tensor = own_BSF.unflatten(2, (-1, width))
    return own_BSNH
