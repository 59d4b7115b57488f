"""One stage of the model on one rank: optional embedding, some layers, optional head.

Shapes: B sequences, S tokens per sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from app.config import ModelConfig
from app.model.block import Layer
from app.model.deferred import WeightQueue, linear
from app.model.layers import Context, RMSNorm, layer_context


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """What a forward of a chunk returns: hidden states or logits, and one router report per MoE layer."""

    x: Tensor
    routing: tuple[Any, ...]


class Chunk(nn.Module):
    """Layers `layers` (global layer index -> layer) of a model, with its embedding and head where asked for.

    `repeatable` keeps to attention kernels whose gradients repeat bit for bit.

    The embedding lookup is `F.embedding`: its backward sorts or owns rows instead of using atomics, so it repeats
    bit for bit on CPU and GPU.
    """

    def __init__(
        self, model: ModelConfig, layers: Mapping[int, Layer], embedding: bool, head: bool, repeatable: bool = True
    ) -> None:
        super().__init__()
        self.repeatable = repeatable
        self.model = model
        self.first, self.last = embedding, head
        table = embedding or (head and model.tie_embeddings)  # a last stage of its own has a copy of a tied one
        self.embedding = nn.Parameter(torch.empty(model.vocab_size, model.hidden_size)) if table else None
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        self.norm = RMSNorm(model.hidden_size, model.norm_eps) if head else None
        untied = head and not model.tie_embeddings
        self.head = nn.Parameter(torch.empty(model.vocab_size, model.hidden_size)) if untied else None

    def context(self, positions_BS: Tensor, documents_BS: Tensor | None, later: WeightQueue | None = None) -> Context:
        """What the layers need besides the hidden states; backward leaves weight gradients in `later` if there is one."""
        width, theta = self.model.head_width, self.model.rope_theta
        return layer_context(positions_BS, documents_BS, width, theta, self.repeatable, later)

    def forward(self, x: Tensor, context: Context, recompute: bool = False) -> ChunkOutput:
        """Tokens B × S (first stage) or hidden states B × S × D -> logits B × S × V (last stage) or hidden states.

        recompute: only the input of each layer is kept, and backward runs the layer's forward again (Chen et al. 2016).
        """
        if self.first:
            x = F.embedding(x, self.embedding)
        routing = []
        for layer in self.layers.values():
            x, report = recomputed(layer, x, context) if recompute else layer(x, context)
            if report is not None:
                routing.append(report)
        return ChunkOutput(self._logits(x, context), tuple(routing))

    def _logits(self, x_BSD: Tensor, context: Context) -> Tensor:
        if self.norm is None:
            return x_BSD
        weight_VD = self.embedding if self.head is None else self.head
        return linear(self.norm(x_BSD), weight_VD, context.later)


def recomputed(layer: Layer, x_BSD: Tensor, context: Context) -> tuple[Tensor, Any]:
    """The layer, of whose forward nothing but the input is kept; nothing in it is drawn at random."""
    return checkpoint(layer, x_BSD, context, use_reentrant=False, preserve_rng_state=False)


def summed_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Cross-entropy in fp32, nats, summed over the positions whose label is not -100; a scalar."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), reduction="sum")
