"""Chunk whose layers have a KV cache each.

Shapes: B sequences, P tokens of the longest prompt, T rows of a step, s = P / tp and t = T / tp of
them between matrices, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from app.model.attention.linear import LinearAttention
from app.model.block import AttendHidden, Layer, Phase, RunPhases, run_phases, value_of
from app.model.chunk import Chunk
from app.model.decoding.layer_caches import CacheSizes, LayerCache, NextToken, layer_cache
from app.model.decoding.recurrent import RecurrentCache
from app.model.layers.layers import Context
from app.plan.phases import PhaseName


class CachedChunk:
    """Chunk that processes prompts first and then one token per sequence; never with gradients."""

    def __init__(self, chunk: Chunk, sizes: CacheSizes) -> None:
        self.chunk = chunk
        self.sizes = sizes
        self.caches: list[LayerCache] = [
            RecurrentCache(layer.attn, sizes)
            if isinstance(layer.attn, LinearAttention)
            else layer_cache(layer.attn, sizes)
            for layer in chunk.in_order
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of all layers."""
        return sum(cache.nbytes for cache in self.caches)

    def prompts(self, x: Tensor, place_1P: Tensor, length_B: Tensor) -> Tensor:
        """Map tokens B × P (first stage) or hidden states B × s × D -> B × s × D, s = P / tp.

        `length_B`: tokens of each prompt; padding follows them.
        """
        attends = [partial(cache.prompt, length_B=length_B) for cache in self.caches]
        return self._forward(x, place_1P, attends, self.sizes.length or place_1P.shape[1])

    def step(self, x: Tensor, place_1T: Tensor, count: int | None = None) -> Tensor:
        """Map tokens 1 × T (first stage) or hidden states 1 × t × D -> 1 × t × D, t = T / tp.

        With `count` the first so many rows are the next tokens of a single sequence.
        """
        place_B = place_1T[0, : count or self.sizes.sequences]
        following = {
            slots: NextToken.at(place_B, slots, self.sizes)
            for slots in dict.fromkeys(cache.slots for cache in self.caches)
        }

        def attend_with(cache: LayerCache) -> AttendHidden:
            return partial(cache.step, following=following[cache.slots])

        attends = [attend_with(cache) for cache in self.caches]
        return self._forward(x, place_1T, attends, self.sizes.length)

    def _forward(
        self, x: Tensor, places: Tensor, attends: Sequence[AttendHidden], length: int
    ) -> Tensor:
        both = zip(self.chunk.in_order, attends, strict=True)
        runs = [_with_memory(layer, attend) for layer, attend in both]
        out: Tensor = self.chunk(x, self.chunk.context(places, None, length=length), runs).x
        return out


def _with_memory(layer: Layer, attend: AttendHidden) -> RunPhases:
    """Return a function that runs the phases of a layer with `attend` in place of its attention."""
    assert layer.phases[0].name is PhaseName.attn, "a layer begins with attention"

    def run(
        phases: Sequence[Phase], values: Mapping[str, object], keep: Sequence[str]
    ) -> dict[str, object]:
        x_BsD = value_of(values, "x", Tensor)
        context = value_of(values, "context", Context)
        outputs = layer.attend_with(attend, x_BsD, context)
        made = dict(zip(phases[0].outputs, outputs, strict=True))
        return run_phases(phases[1:], {"x": x_BsD, **made, "context": context}, keep)

    return run
