"""Prepare a step's microbatches for the executor: tensors on the device, and loss weights.

Shapes: B sequences, S tokens per sequence, M microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.choices import Normalize
from app.collectives import all_reduce
from app.data.feed import IGNORED, Batch
from app.engine.ranks.groups import Groups
from app.model.layers.context_parallel import own_tokens


@dataclass(frozen=True, slots=True)
class StepInput:
    """Microbatches of one step on this rank, on the device."""

    batches: tuple[Batch, ...]  # this rank's tokens of each sequence; documents of all
    loss_weights_M: Tensor  # fp32; factor on each microbatch's summed token losses
    routing_weight: float  # factor on each microbatch's router losses
    scale: Tensor | None  # loss scale, applied where backward starts; None disables it
    valid: Tensor  # int64 scalar; tokens with a label in the global batch


LoadedBatches = tuple[tuple[Batch, ...], Tensor]  # microbatches; tokens with a label, int64 [M]


class Loader:
    """Loader of this rank's part of microbatches; copies overlap with the GPU's computation."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.groups = groups
        self.device = device
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.ahead: tuple[Sequence[Batch], LoadedBatches, torch.cuda.Event | None] | None = None

    def start(self, batches: Sequence[Batch]) -> None:
        """Start to load the batches that `take` will get next."""
        if self.side is None:
            self.ahead = batches, self._load(batches), None
            return
        with torch.cuda.stream(self.side):
            loaded = self._load(batches)
            there = torch.cuda.Event()
            there.record()
        self.ahead = batches, loaded, there

    def take(self, batches: Sequence[Batch]) -> LoadedBatches:
        """Return the microbatches on the device, and how many tokens of each have a label."""
        if self.ahead is None or self.ahead[0] is not batches:
            self.start(batches)
        assert self.ahead is not None
        (_, loaded, there), self.ahead = self.ahead, None
        if there is not None:
            here = torch.cuda.current_stream()
            here.wait_event(there)
            # The tensors come from the side stream: the allocator must not reuse their memory
            # there while this stream still reads them.
            for tensor in (tensor for batch in loaded[0] for tensor in _tensors(batch)):
                tensor.record_stream(here)
            loaded[1].record_stream(here)
        return loaded

    def _load(self, batches: Sequence[Batch]) -> LoadedBatches:
        seq_len = batches[0].tokens_BS.shape[1]
        own_S = own_tokens(seq_len, self.groups.layout.cp, self.groups.cp_rank)
        # counted on the CPU over whole sequences, hence the same on all context-parallel ranks
        counts_M = torch.stack([(batch.labels_BS != IGNORED).sum() for batch in batches])
        return tuple(self._part(batch, own_S) for batch in batches), self._move(counts_M)

    def _part(self, batch: Batch, own_S: Tensor) -> Batch:
        ends = batch.ends_BD
        return Batch(
            tokens_BS=self._move(batch.tokens_BS[:, own_S]),
            labels_BS=self._move(batch.labels_BS[:, own_S]),
            positions_BS=self._move(batch.positions_BS[:, own_S]),
            ends_BD=None if ends is None else self._move(ends),
        )

    def _move(self, tensor: Tensor) -> Tensor:
        if self.side is None:
            return tensor
        # only copies from pinned memory are asynchronous to the host
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _tensors(batch: Batch) -> list[Tensor]:
    ends = [] if batch.ends_BD is None else [batch.ends_BD]
    return [batch.tokens_BS, batch.labels_BS, batch.positions_BS, *ends]


def step_input(
    loaded: LoadedBatches,
    normalize: Normalize,
    dp: int,
    groups: Groups,
    scale: Tensor | None = None,
) -> StepInput:
    """Return a step's microbatches with the weights of their losses.

    `token` divides every microbatch's loss by the valid tokens of the global batch, so that all
    tokens weigh the same. `microbatch` divides it by its own valid tokens and by the number of
    microbatches. The divisor stays on the device.
    """
    batches, counts_M = loaded
    valid = counts_M.sum()
    all_reduce(valid, groups.dp_control)
    if normalize is Normalize.token:
        weights_M = valid.clamp(min=1).float().reciprocal().expand(len(batches))
    else:
        weights_M = (counts_M.clamp(min=1) * (len(batches) * dp)).float().reciprocal()
    return StepInput(batches, weights_M, 1.0 / (len(batches) * dp), scale=scale, valid=valid)
