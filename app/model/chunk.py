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

from app.config import ModelConfig
from app.model.block import Layer
from app.model.layers import AttentionContext, RMSNorm, attention_context


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
        self.embedding = nn.Parameter(torch.empty(model.vocab_size, model.hidden_size)) if embedding else None
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        self.norm = RMSNorm(model.hidden_size, model.norm_eps) if head else None
        untied = head and not model.tie_embeddings
        self.head = nn.Parameter(torch.empty(model.vocab_size, model.hidden_size)) if untied else None

    def context(self, positions_BS: Tensor, documents_BS: Tensor | None) -> AttentionContext:
        """What the attention layers need besides the hidden states."""
        return attention_context(positions_BS, documents_BS, self.model.head_width, self.model.rope_theta, self.repeatable)

    def forward(self, x: Tensor, context: AttentionContext) -> ChunkOutput:
        """Tokens B × S (with an embedding) or hidden states B × S × D -> logits B × S × V (with a head) or hidden states."""
        if self.embedding is not None:
            x = F.embedding(x, self.embedding)
        routing = []
        for layer in self.layers.values():
            x, report = layer(x, context)
            if report is not None:
                routing.append(report)
        return ChunkOutput(self._logits(x), tuple(routing))

    def _logits(self, x_BSD: Tensor) -> Tensor:
        if self.norm is None:
            return x_BSD
        weight_VD = self.embedding if self.head is None else self.head
        return F.linear(self.norm(x_BSD), weight_VD)


def summed_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Cross-entropy in fp32, nats, summed over the positions whose label is not -100; a scalar."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), reduction="sum")
