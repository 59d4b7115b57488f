"""Hugging Face weights into the chunks of a rank."""

from __future__ import annotations

from collections.abc import Iterable

from app.hf.pretrained import Pretrained
from app.hf.tables import router_bias
from app.model.chunk import Chunk
from app.moe.phases import Router
from app.plan.sharding.blocks import ShardCoords


def fill_chunks(chunks: Iterable[Chunk], pretrained: Pretrained, coords: ShardCoords) -> None:
    """Fill this rank's parts of all weights, and the biases of its routers. Raises ConfigError."""
    for chunk in chunks:
        pretrained.fill(chunk.weights(), coords)
        for name, module in chunk.named_modules():
            if isinstance(module, Router):
                biases = router_bias(chunk.model, name)
                pretrained.fill(((weight, module.bias_E) for weight in biases), coords)
