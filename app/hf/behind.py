"""Layers behind the decoder's in files, which predict further tokens (`app.model.ahead`).

Files hold them as layers of higher numbers, with what is around them and, as published, copies of
the tables of tokens. A model takes as many of them as it was asked for; the others are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import ModelConfig
from app.errors import ConfigError
from app.hf.fits import whole
from app.hf.tables import EMBEDDING, HEAD, NameLine
from app.plan.formatting import count_of

COUNTS = "num_nextn_predict_layers", "num_mtp_layers"  # keys of config.json for one number
PROJ = "eh_proj.weight"  # a tensor that no other layer has
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
LINES = (
    NameLine("ahead.embedding_norm.weight", ("enorm.weight",), whole),
    NameLine("ahead.hidden_norm.weight", ("hnorm.weight",), whole),
    NameLine("ahead.proj", (PROJ,), whole),
    NameLine("ahead.norm.weight", ("shared_head.norm.weight",), whole),
)
# keys of config.json of MiniMax-M2 that have no effect, and why
OF_MINIMAX = dict.fromkeys(
    ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    "layers that predict further tokens, which published files lack",
)


@dataclass(frozen=True, slots=True)
class Behind:
    """What a family's files have behind the decoder's layers."""

    usual: int = 0  # layers that config.json need not mention
    lines: tuple[NameLine, ...] = ()  # weights around them; none: they are always left out
    block: str | None = None  # beginning of the names of more tensors, which are left out

    def counted(self, config: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
        """Return a config.json with the model's number of layers."""
        if not self.lines:
            return config
        config = config | {COUNTS[0]: model.layers_behind}
        return {name: value for name, value in config.items() if name != COUNTS[1]}

    def left_out(
        self, names: Iterable[str], listed: Sequence[int], model: ModelConfig, folder: Path
    ) -> LeftOut:
        """Return what a model leaves out of these tensors, with the layers that config.json lists.

        Raises ConfigError if the model needs more layers than there are.
        """
        found = (LAYER.fullmatch(name) for name in names)
        marked = sorted(int(layer[1]) for layer in found if layer and layer[2] == PROJ)
        there, needed = [layer for layer in marked if layer in listed], model.layers_behind
        if needed > len(there) or (needed and not self.lines):
            rule = f"{folder} has {count_of(len(there), 'layer')} of multi-token prediction"
            raise ConfigError("model.mtp.layers", needed, rule, nearest=len(there))
        return LeftOut(there[needed:], self.block)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Tensors behind the decoder's layers that a model does not read."""

    layers: Sequence[int]
    block: str | None

    def __contains__(self, name: str) -> bool:
        layer = LAYER.fullmatch(name)
        return self._in_block(name) or (layer is not None and int(layer[1]) in self.layers)

    def phrases(self, names: Iterable[str]) -> Iterator[str]:
        """Yield what is left out of these tensors, in words."""
        places = [f"model.layers.{layer}" for layer in self.layers]
        places += [f"{self.block}*"] if any(map(self._in_block, names)) else []
        return (f"{place}, which predicts further tokens" for place in places)

    def _in_block(self, name: str) -> bool:
        return self.block is not None and name.startswith(self.block)


NONE, ONE, BLOCK = Behind(), Behind(usual=1, lines=LINES), Behind(block="model.mtp_")


def copies(model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield names of tensors of which layers behind the decoder's have copies in files: of the
    copy, of the tensor, and of our weight.
    """
    for layer in model.all_layers[model.num_layers :]:
        yield f"model.layers.{layer}.embed_tokens.weight", EMBEDDING, "embedding"
        head = (EMBEDDING, "embedding") if model.tie_embeddings else (HEAD, "head")
        yield f"model.layers.{layer}.shared_head.head.weight", *head
