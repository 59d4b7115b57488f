"""Weights of a checkpoint with its adapters added to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from app.config import LoraConfig, ModelConfig
from app.engine.checkpoint.weights import SavedWeights
from app.engine.files.run_folder import from_plain
from app.model.chunk import Chunk
from app.model.lora import adapter_delta
from app.plan.model.stage import model_weights
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.reshard import Block


def adapters_of(manifest: dict[str, Any]) -> LoraConfig | None:
    """Return the adapters that a checkpoint holds."""
    found = manifest["config"].get("lora") or {}
    if found.get("rank") is None:
        return None
    lora = from_plain(LoraConfig, found)
    assert isinstance(lora, LoraConfig)
    return lora


class MergedWeights(SavedWeights):
    """`SavedWeights` of a checkpoint with adapters, which are added to what is read."""

    def __init__(
        self, path: Path, manifest: dict[str, Any], model: ModelConfig, lora: LoraConfig
    ) -> None:
        super().__init__(path, manifest)
        self.lora = lora
        weights = {named.name: named.weight for named in model_weights(model, lora)}
        self._adapted = {name: weight for name, weight in weights.items() if weight.adapters}
        # cache of the one read last, as large as its weight: its boxes come in turn
        self._delta: tuple[str, Tensor] | None = None

    def read(self, name: str, box: Block) -> Tensor:
        """See `SavedWeights`."""
        out = super().read(name, box)
        if name in self._adapted:
            held = self.added(name).reshape(box.shape)
            out += held[tuple(map(slice, box.start, box.stop))]
        return out

    def added(self, name: str) -> Tensor:
        """Return what the adapters of a weight add to it: fp32, in the weight's shape."""
        if self._delta is None or self._delta[0] != name:
            self._delta = None  # free it first
            weight = self._adapted[name]
            pairs = []
            for each in weight.adapters:
                a, b = (
                    SavedWeights.read(self, path, Block.whole(*matrix.shape))
                    for path, matrix in each.weights(name)
                )
                pairs.append((each, a, b))
            self._delta = name, adapter_delta(pairs, self.lora.scale).reshape(weight.shape)
        return self._delta[1]

    def add_to(self, chunks: Sequence[Chunk], coords: ShardCoords) -> None:
        """Add the adapters to this rank's weights."""
        for chunk in chunks:
            for named, param in chunk.weights():
                if named.name in self._adapted:
                    block = coords.block(named.weight)
                    held = self.added(named.name)[tuple(map(slice, block.start, block.stop))]
                    param.data.copy_(
                        param.data.float() + held.reshape(param.shape).to(param.device)
                    )
