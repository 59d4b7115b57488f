"""Training loss of every source of a blend.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp, D hidden, K
sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from app.data.feed import Batch
from app.model.block import StepState
from app.model.chunk import Chunk, TokenLosses
from app.model.layers.layer_groups import rank
from app.model.layers.layers import Context


class SourceLosses(StepState):
    """Sums of this rank's token losses and labels by source, from the start of a step on."""

    def __init__(self, labels: Sequence[str], device: torch.device) -> None:
        self.labels = labels
        self.numbers_K1 = torch.arange(len(labels), device=device)[:, None]
        self.losses_K, self.counts_K = torch.zeros(2, len(labels), device=device)

    def start_step(self) -> None:
        """Clear the sums."""
        self.losses_K.zero_()
        self.counts_K.zero_()

    def losses(self, chunk: Chunk, x_BsD: Tensor, batch: Batch, context: Context) -> TokenLosses:
        """Return the chunk's losses; in a training step, count its parts."""
        losses = chunk.losses_of(x_BsD, batch.labels_BS, context)
        # All tensor-parallel ranks have the same parts. A validation has one source at a time.
        if batch.sources_B is not None and rank(chunk.layer_groups.tp) == 0:
            own_KB = batch.sources_B == self.numbers_K1
            counts_B = (batch.labels_BS >= 0).sum(dim=1)
            self.losses_K += torch.where(own_KB, losses.each_BS.sum(dim=1), 0.0).sum(dim=1)
            self.counts_K += torch.where(own_KB, counts_B, 0).sum(dim=1)
        return losses

    def sums(self) -> Mapping[str, Tensor]:
        """Return sums of losses, nats, and of labels."""
        losses = {f"loss/{label}": self.losses_K[k] for k, label in enumerate(self.labels)}
        counts = {f"labels/{label}": self.counts_K[k] for k, label in enumerate(self.labels)}
        return losses | counts

    def metrics(self, sums: Mapping[str, float]) -> Mapping[str, object]:
        """Return nats per token of every source with a label in this step."""
        counts = {label: sums[f"labels/{label}"] for label in self.labels}
        found = {label: sums[f"loss/{label}"] / n for label, n in counts.items() if n}
        return {"loss": found}
