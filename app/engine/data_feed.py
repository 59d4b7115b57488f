"""From the data's microbatches to what the executor runs on: tensors on the device and the weight of each loss.

Shapes: B sequences, S tokens per sequence, M microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from app.choices import Normalize
from app.compat import all_reduce
from app.data.feed import IGNORED, Batch


@dataclass(frozen=True, slots=True)
class StepInput:
    """Microbatches of one step on this rank, on the device."""

    batches: tuple[Batch, ...]
    loss_weights_M: Tensor  # fp32: factor on each microbatch's summed token losses
    routing_weight: float  # factor on each microbatch's router losses
    valid: Tensor  # int64 scalar: tokens with a label in the whole step, all ranks


def step_input(
    batches: Sequence[Batch], normalize: Normalize, dp: int, group: dist.ProcessGroup, device: torch.device
) -> StepInput:
    """Move a step's microbatches to `device` and find the divisors of their losses.

    token: every microbatch by the valid tokens of the whole step over `group`, so that each token counts the same;
    microbatch: each by its own valid tokens and the number of microbatches. The divisor stays on the device.
    """
    counts_M = torch.stack([(batch.labels_BS != IGNORED).sum() for batch in batches]).to(device, non_blocking=True)
    valid = counts_M.sum()
    all_reduce(valid, group)
    if normalize is Normalize.token:
        weights_M = valid.clamp(min=1).float().reciprocal().expand(len(batches))
    else:
        weights_M = (counts_M.clamp(min=1) * (len(batches) * dp)).float().reciprocal()
    moved = tuple(_to(batch, device) for batch in batches)
    return StepInput(moved, weights_M, 1.0 / (len(batches) * dp), valid)


def _to(batch: Batch, device: torch.device) -> Batch:
    tensors = (batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.documents_BS)
    return Batch(*(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in tensors))
