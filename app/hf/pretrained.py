"""Hugging Face model in a folder: its configuration, and its weights read by part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from app.config import ModelConfig
from app.hf import tables
from app.hf.behind import copies
from app.hf.file_names import CONFIG_JSON
from app.hf.files import TensorFiles
from app.hf.tables import mapping, router_biases
from app.hf.their_model import TheirModel
from app.hf.weight_part import WeightPart, grouped, names
from app.hf.wrapped import IMAGES, VISION
from app.hf.write import PART_NUMEL
from app.plan.model.stage import NamedWeight, model_weights
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.reshard import Block
from app.plan.shards import Bounds

# redundant tensors: `transformers` saved tables of rotary frequencies until version 4.31
SAID_ELSEWHERE = re.compile(r"\.rotary_emb\.inv_freq$")
MOST_NAMED = 3  # most tensors named in a message
COMPARED_NUMEL = 2**22  # elements of head and embedding compared at a time


class Pretrained:
    """Weights of a model, checked to be complete and without unknown tensors. Every rank opens them
    itself.

    `like`: a model with as many layers behind the decoder's as are read; None: with none. Raises
    ConfigError, naming file and tensor.
    """

    def __init__(self, folder: Path, key: str, like: ModelConfig | None = None) -> None:
        self.their = TheirModel.read(folder, key)
        self.model = self.their.model if like is None else self.their.model.with_behind(like)
        self.files = TensorFiles(folder, key, self.their.quantised)
        self._layers = self.their.family.layers_name
        self._table = self.their.family.table(self.their.model)
        behind = self.their.family.behind
        self._behind = behind.left_out(self.files.file_of, self.their.behind, self.model, folder)
        self._check_names()

    def parts(self, weight: NamedWeight) -> Sequence[WeightPart]:
        """Return the parts of the files that hold a weight, in the spelling that the files use."""
        spellings = mapping(self._table, self.model, weight, self._layers).spellings
        for parts in spellings:
            if all(name in self.files.file_of for name in names(parts)):
                return parts
        missing = [name for name in names(spellings[0]) if name not in self.files.file_of]
        raise self.files.refusal(f"{_some(missing)} missing from the files")

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[NamedWeight, Tensor]], coords: ShardCoords) -> None:
        """Fill this rank's parts of weights in place, reading only these."""
        for named, tensor in weights:
            self.fill_block(named, coords.block(named.weight), tensor)

    def fill_block(self, named: NamedWeight, block: Block, tensor: Tensor) -> None:
        """Fill a contiguous tensor with the elements of a block of a weight."""
        for part in self.parts(named):
            cut = part.within(block)
            if cut is None:
                continue
            self.files.check(part.name, part.shape)
            for piece in cut.pieces(PART_NUMEL):
                values = self.files.read(part.name, piece.region).reshape(piece.their_sizes)
                tensor.view(piece.held.sizes)[piece.box].copy_(values.permute(part.order))

    def fill_part(self, named: NamedWeight, block: Block, part: Bounds, tensor: Tensor) -> None:
        """Fill a flat tensor with a part of a flattened block of a weight."""
        low, high = part
        first = 0  # offset of a row block's first element in the flattened block
        for rows in self.row_blocks(named, block):
            begin, end = max(low, first), min(high, first + rows.numel)
            if begin < end:
                values = torch.empty(rows.sizes, dtype=tensor.dtype)
                self.fill_block(named, rows, values)
                own = values.view(-1)[begin - first : end - first]
                tensor[begin - low : end - low].copy_(own)
            first += rows.numel

    def row_blocks(self, named: NamedWeight, block: Block) -> Iterator[Block]:
        """Split a block of a weight into blocks of consecutive rows of about PART_NUMEL at most."""
        shape = block.shape
        apart = self.parts(named)[0].ours.shape
        first, *inner = (apart[dim] for dim in grouped(shape, apart)[0])
        unit = prod(inner) if first > 1 else shape[0]  # rows that must stay together
        rows = max(1, PART_NUMEL // prod(block.sizes[1:]) // unit) * unit
        for low in range(block.start[0], block.stop[0], rows):
            high = min(low + rows, block.stop[0])
            yield Block(shape, (low, *block.start[1:]), (high, *block.stop[1:]))

    def biases(self) -> Iterator[NamedWeight]:
        """Yield the biases of all routers."""
        return router_biases(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the embedding, which most weights usually share."""
        return self.dtype_of(next(model_weights(self.model)))

    def dtype_of(self, named: NamedWeight) -> torch.dtype:
        """Return a type that holds a weight without rounding; bfloat16 if it is quantised."""
        kinds = (self.files.dtype(name) for name in names(self.parts(named)))
        return reduce(torch.promote_types, kinds)

    def finer(self, dtype: torch.dtype) -> str | None:
        """Name the tensors that this type would round, if only some are more precise than it."""
        weights = model_weights(self.model)
        found = {
            name: self.files.dtype(name) for named in weights for name in names(self.parts(named))
        }
        rounded = [
            name for name, kind in found.items() if torch.promote_types(kind, dtype) != dtype
        ]
        if not rounded or len(rounded) == len(found):
            return None
        kinds = sorted({str(found[name]).removeprefix("torch.") for name in rounded})
        return f"{_some(rounded)} {' or '.join(kinds)}"

    def _check_names(self) -> None:
        used = {
            name
            for weight in self.their.family.weights(self.model)
            for name in names(self.parts(weight))
        }
        same = {copy: name for copy, name, _ in copies(self.model)}
        if self.model.tie_embeddings:
            embedding, heads = tables.embedding_and_heads(self._table)
            same |= dict.fromkeys(heads, embedding)
        for copy in sorted(same.keys() & self.files.file_of.keys()):
            used.add(copy)
            self._check_copy(copy, same[copy])
        unknown = [
            name for name in self.files.file_of if name not in used and not self._left_out(name)
        ]
        if unknown:
            kind = self.their.family.model_type
            raise self.files.refusal(f"{_some(unknown)} unknown in models of type {kind}")

    def _check_copy(self, copy: str, name: str) -> None:
        """Compare all rows of a table of tokens with those of its copy in the files."""
        shape = self.model.vocab_size, self.model.hidden_size
        for each in (name, copy):
            self.files.check(each, shape)
        rows = max(1, COMPARED_NUMEL // shape[1])
        for low in range(0, shape[0], rows):
            region = (low, min(low + rows, shape[0])), (0, shape[1])
            one, other = (self.files.read(each, region).float() for each in (copy, name))
            if not one.equal(other):
                row = low + int((one != other).any(dim=1).nonzero()[0])
                tied = copy in tables.embedding_and_heads(self._table)[1]
                why = "tie_word_embeddings makes" if tied else "this model has"
                raise self.files.refusal(
                    f"{copy} differs from {name} in row {row}, and {why} them one"
                )

    def _left_out(self, name: str) -> bool:
        redundant = name.endswith(self.their.family.redundant or "\n")
        elsewhere = redundant or SAID_ELSEWHERE.search(name) is not None
        beside = name in self._behind or name in self.files.left_out
        return elsewhere or beside or self._of_images(name)

    def _of_images(self, name: str) -> bool:
        return name.startswith(IMAGES) and VISION in self.their.config.values

    def left_out(self) -> str | None:
        """Return a line on what is not read of the model's files; None if everything is."""
        texts = [*self._behind.phrases(self.files.file_of)]
        if any(map(self._of_images, self.files.file_of)):
            texts.append(f"{IMAGES}*, which reads images")
        if scales := sorted(self.files.left_out):
            texts.append(f"{_listed(scales)}, as activations are not quantised")
        texts += [f"{CONFIG_JSON}: {phrase}" for phrase in self.their.left_out]
        return f"left out: {'; '.join(texts)}" if texts else None


def _some(listed: Sequence[str]) -> str:
    return f"{_listed(listed)} {'is' if len(listed) == 1 else 'are'}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
