"""From the data's microbatches to what the executor runs on: tensors on the device and the weight of each loss.

Shapes: B sequences, S tokens per sequence, M microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.choices import Normalize
from app.compat import all_reduce
from app.data.feed import IGNORED, Batch
from app.engine.groups import Groups
from app.model.context_parallel import own_tokens


@dataclass(frozen=True, slots=True)
class StepInput:
    """Microbatches of one step on this rank, on the device."""

    batches: tuple[Batch, ...]  # this rank's tokens of every sequence, and the documents of all of them
    loss_weights_M: Tensor  # fp32: factor on each microbatch's summed token losses
    routing_weight: float  # factor on each microbatch's router losses
    scale: Tensor | None  # factor on all losses where backward starts; None: 1
    valid: Tensor  # int64 scalar: tokens with a label in the whole step, all ranks


def step_input(
    batches: Sequence[Batch], normalize: Normalize, dp: int, groups: Groups, device: torch.device, scale: Tensor | None = None
) -> StepInput:
    """Move a step's microbatches to `device`, of every sequence this rank's part, and find the divisors of their losses.

    token: every microbatch by the valid tokens of the whole step, so that each token counts the same;
    microbatch: each by its own valid tokens and the number of microbatches. The divisor stays on the device.
    """
    counts_M = torch.stack([(batch.labels_BS != IGNORED).sum() for batch in batches]).to(device, non_blocking=True)
    valid = counts_M.sum()
    all_reduce(valid, groups.data)
    if normalize is Normalize.token:
        weights_M = valid.clamp(min=1).float().reciprocal().expand(len(batches))
    else:
        weights_M = (counts_M.clamp(min=1) * (len(batches) * dp)).float().reciprocal()
    own_S = own_tokens(batches[0].tokens_BS.shape[1], groups.layout.cp, groups.cp_rank)
    moved = tuple(_part(batch, own_S, device) for batch in batches)
    return StepInput(moved, weights_M, 1.0 / (len(batches) * dp), scale, valid)


def _part(batch: Batch, own_S: Tensor, device: torch.device) -> Batch:
    cut = (batch.tokens_BS, batch.labels_BS, batch.positions_BS)
    documents = None if batch.documents_BS is None else batch.documents_BS.to(device, non_blocking=True)
    return Batch(*(tensor[:, own_S].to(device, non_blocking=True) for tensor in cut), documents)
