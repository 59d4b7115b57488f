"""Autoregressive decoding with a key-value cache, over all ranks that hold parts of a model.

Pipeline stages run one after the other, for prompts and for every token. Context-parallel ranks
all do the same work on whole sequences. Data-parallel replicas may have different sequences, but
equally many and of the same width (`app.engine.decoding.replicas`).

Shapes: B sequences; P tokens of the longest prompt, padded to a multiple of tp; M positions of the
cache; T rows of a step: B padded to a multiple of tp; s = P / tp and t = T / tp of them between
matrices; D hidden size; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_reduce
from app.engine.capture.recorder import Recorder
from app.engine.decoding.captured import CapturedStep, why_eager
from app.engine.ranks.dtypes import DTYPES
from app.engine.ranks.groups import Groups
from app.model.chunk import Chunk
from app.model.decoding.cached_chunk import CachedChunk
from app.model.decoding.layer_caches import CacheSizes
from app.model.layers.layer_groups import gather_tokens
from app.planner.decoding import padded
from app.planner.plan import Plan

NO_LABEL = -1
PADDING = 0  # padding token of prompts and steps; any id will do


class Model(Protocol):
    """One rank's part of a model: an `Engine`, or weights alone."""

    @property
    def plan(self) -> Plan:
        """Plan of the run or of inference."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks of this rank."""

    @property
    def groups(self) -> Groups:
        """Communicators of this rank."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    def all_rows(self) -> AbstractContextManager[None]:
        """Give experts memory for all dispatched tokens within the block."""


class Decoder:
    """Key-value cache for B sequences of at most M tokens, and the forwards that fill it.

    All ranks call its methods together, those of a replica with the same tokens. With a `recorder`
    steps are captured if possible. With 0 `places` there is no cache, and only `losses` works.
    """

    def __init__(
        self, model: Model, sequences: int, places: int, recorder: Recorder | None = None
    ) -> None:
        self.model = model
        self.run = model.plan.run
        self.sequences = sequences
        self.tp = model.groups.layout.tp
        self.dtype = DTYPES[self.run.precision.params]
        length, places = places, padded(places, self.tp)
        sizes = CacheSizes(sequences, places, self.dtype, device=model.device, length=length)
        self.sizes = sizes
        self.cached = [CachedChunk(chunk, sizes) for chunk in model.chunks]
        self.rows = padded(sequences, self.tp)  # T
        self.eager = why_eager(self.run, model.chunks, self.rows // self.tp, model.device)
        self.steps: list[Callable[[Tensor], Tensor]] = [
            self._step_of(cached, recorder) for cached in self.cached
        ]
        # position of the next token of each sequence; 0 for padding rows
        self.place_T = torch.zeros(self.rows, dtype=torch.int64, device=model.device)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's key-value cache."""
        return sum(cached.nbytes for cached in self.cached)

    @torch.no_grad()
    def prompts(self, prompts: Sequence[Sequence[int]], width: int = 0) -> Tensor:
        """Prefill B new prompts; returns the logits after each, fp32 B × V, on all replica ranks.

        Prompts are padded to the longest one, and at least to `width`.
        """
        length_B = torch.tensor([len(prompt) for prompt in prompts], device=self.model.device)
        tokens_BP = self._padded_batch(prompts, width)
        assert tokens_BP.shape[1] <= self.sizes.places, "prompts fit the cache"
        self.place_T[: self.sequences] = length_B
        x_BsD = self._prompts(tokens_BP, length_B)
        return self._logits(
            lambda: self.model.chunks[-1].logits(self._last_tokens(x_BsD, length_B))
        )

    @torch.no_grad()
    def losses(self, texts: Sequence[Sequence[int]], width: int = 0) -> Tensor:
        """Return the loss in nats of each token of B texts given those before it, fp32 B × P.

        It is 0 for the first token and for padding, and the same on every rank of the replica.
        Overwrites the cache. Texts are padded as prompts are.
        """
        tokens_BP = self._padded_batch(texts, width)
        # the label of a position is the next token; the last token and padding have none
        labels_BP = torch.full_like(tokens_BP, NO_LABEL)
        for sequence, text in enumerate(texts):
            labels_BP[sequence, : len(text) - 1] = tokens_BP[sequence, 1 : len(text)]
        length_B = torch.tensor([len(text) for text in texts], device=self.model.device)
        x_BsD = self._prompts(tokens_BP, length_B)
        pipeline = self.model.plan.stages.pipeline
        nats_BP = torch.zeros(tokens_BP.shape, dtype=torch.float32, device=self.model.device)
        if pipeline.rank(pipeline.last) == self.model.groups.pp_rank:
            nats_BP[:, 1:] = self.model.chunks[-1].losses(x_BsD, labels_BP)[:, :-1]
        all_reduce(nats_BP, self.model.groups.pp)  # a broadcast: zero except on the last stage
        return nats_BP

    def _padded_batch(self, texts: Sequence[Sequence[int]], width: int) -> Tensor:
        """Return B texts padded to P tokens, int64 B × P."""
        assert len(texts) == self.sequences, "the cache is for this many"
        assert all(texts), "each has a token"
        width = padded(max(width, *map(len, texts)), self.tp)
        rows = [[*text, *[PADDING] * (width - len(text))] for text in texts]
        return torch.tensor(rows, device=self.model.device)

    def _prompts(self, tokens_BP: Tensor, length_B: Tensor) -> Tensor:
        """Return the last stage's hidden states, on its ranks: B × s × D, s = P / tp."""
        width = tokens_BP.shape[1]
        place_1P = torch.arange(width, device=self.model.device)[None]
        hidden = torch.Size((self.sequences, width // self.tp, self.run.model.hidden_size))
        with self.model.all_rows():
            return self._stages(
                tokens_BP, hidden, lambda nth, x: self.cached[nth].prompts(x, place_1P, length_B)
            )

    @torch.no_grad()
    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Add a token to each sequence; returns the logits after it, fp32 B × V, on every rank."""
        tokens_1T = torch.full((1, self.rows), PADDING, device=self.model.device)
        tokens_1T[0, : self.sequences] = torch.as_tensor(tokens)
        hidden = torch.Size((1, self.rows // self.tp, self.run.model.hidden_size))
        columns_1TV = self._stages(tokens_1T, hidden, lambda nth, x: self.steps[nth](x))
        logits_BV = self._logits(lambda: columns_1TV)
        self.place_T[: self.sequences] += 1
        return logits_BV

    @property
    def slots(self) -> int:
        """Tokens of a sequence that each cache of this rank holds."""
        return min(cache.slots for cached in self.cached for cache in cached.caches)

    @torch.no_grad()
    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Add tokens to the only sequence, which all `slots` hold; returns the logits after them,
        fp32 1 × V.
        """
        assert self.sequences == 1, "one sequence gets several tokens"
        rows, count = padded(len(tokens), self.tp), len(tokens)
        tokens_1T = torch.full((1, rows), PADDING, device=self.model.device)
        tokens_1T[0, :count] = torch.as_tensor(tokens)
        place_1T = self.place_T[:1] + torch.arange(rows, device=self.model.device)[None]
        hidden = torch.Size((1, rows // self.tp, self.run.model.hidden_size))
        with self.model.all_rows():
            x_1tD = self._stages(
                tokens_1T, hidden, lambda nth, x: self.cached[nth].step(x, place_1T, count)
            )
        self.place_T[:1] += count
        length_1 = torch.tensor([count], device=self.model.device)
        return self._logits(
            lambda: self.model.chunks[-1].logits(self._last_tokens(x_1tD, length_1))
        )

    def _step_of(
        self, cached: CachedChunk, recorder: Recorder | None
    ) -> Callable[[Tensor], Tensor]:
        """Return the decoding step of a chunk, captured or eager; the last stage's gives logits."""
        if recorder is not None and self.eager is None:
            return CapturedStep(lambda x: self._step(cached, x), recorder)

        def eagerly(x: Tensor) -> Tensor:
            with self.model.all_rows():
                return self._step(cached, x)

        return eagerly

    def _step(self, cached: CachedChunk, x: Tensor) -> Tensor:
        x_1tD = cached.step(x, self.place_T[None])
        return cached.chunk.logits(x_1tD) if cached.chunk.last else x_1tD

    def _stages(
        self, tokens: Tensor, hidden: torch.Size, compute: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Run all stages one after the other; returns the last stage's output on its ranks.

        `compute(n, x)` runs this rank's n-th chunk. `hidden` is the shape sent between stages.
        """
        groups = self.model.groups
        pipeline = self.model.plan.stages.pipeline
        ranks = dist.get_process_group_ranks(groups.pp)
        here = groups.pp_rank
        x = tokens
        for stage in range(pipeline.last + 1):
            owner = pipeline.rank(stage)
            following = pipeline.rank(min(stage + 1, pipeline.last))
            if owner == here:
                x = compute(stage // pipeline.pp, x)
            if following != owner and here == owner:
                _send_or_recv(dist.isend, x.contiguous(), ranks[following], group=groups.pp)
            elif following != owner and here == following:
                x = torch.empty(hidden, dtype=self.dtype, device=self.model.device)
                _send_or_recv(dist.irecv, x, ranks[owner], group=groups.pp)
        return x

    def _last_tokens(self, x_BsD: Tensor, length_B: Tensor) -> Tensor:
        """Return this rank's rows of the last tokens of prompts: 1 × t × D, t = T / tp."""
        groups = self.model.groups
        x_BPD = gather_tokens(x_BsD, groups.tp)
        sequence_B = torch.arange(self.sequences, device=x_BPD.device)
        last_TD = x_BPD.new_zeros(self.rows, x_BPD.shape[2])
        last_TD[: self.sequences] = x_BPD[sequence_B, length_B - 1]
        return last_TD.chunk(self.tp)[groups.coords.tp[0]][None]

    def _logits(self, columns: Callable[[], Tensor]) -> Tensor:
        """Return logits of B tokens on every rank; `columns`: the last stage's, 1 × T × V / tp."""
        groups = self.model.groups
        pipeline = self.model.plan.stages.pipeline
        shape = self.sequences, self.tp, self.run.model.vocab_size // self.tp
        logits = torch.zeros(shape, dtype=torch.float32, device=self.model.device)
        if pipeline.rank(pipeline.last) == groups.pp_rank:
            logits[:, groups.coords.tp[0]] = columns()[0, : self.sequences].float()
        # an all-gather by sums: each value is non-zero on one rank only
        for group in (groups.tp, groups.pp):
            all_reduce(logits, group)
        return logits.flatten(1)


def _send_or_recv(
    operation: Callable[..., Any], tensor: Tensor, peer: int, *, group: dist.ProcessGroup
) -> None:
    # A batch of one, since NCCL else creates a communicator per pair of ranks, and warns.
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)]):
        work.wait()
