"""A model that continues token sequences, over all ranks that hold parts of it.

Stages take their turns: for prompts, and for every token. Ranks of one sequence (context
parallelism) do the same work, each with whole sequences; replicas may have other sequences, but as
many, of the same width (`app.engine.decoding.replicas`).

Shapes: B sequences, P tokens of the longest prompt, so many that tensor-parallel ranks divide them,
M places of the memory, T rows of a step: B, and more for the same reason; D hidden, V vocabulary.
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
from app.engine.dtypes import DTYPES
from app.engine.groups import Groups
from app.model.chunk import Chunk
from app.model.decoding.cached_chunk import CachedChunk
from app.model.decoding.layer_caches import CacheSizes, NextToken
from app.model.tensor_parallel import gather_tokens
from app.plan.memory.decoding import padded
from app.plan.plan import Plan

NO_LABEL = -1
FILLING = 0  # the token that fills up prompts and steps: any will do


class Model(Protocol):
    """What a rank has of a model: an `Engine`, or weights alone."""

    @property
    def plan(self) -> Plan:
        """Of what the ranks hold."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Those of this rank."""

    @property
    def groups(self) -> Groups:
        """Its communicators."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def all_rows(self) -> AbstractContextManager[None]:
        """Within the block experts have memory for all their rows."""


class Decoder:
    """Memory for B sequences of at most M tokens, and what fills it. All ranks call its methods
    together, those of a replica with the same tokens. With a `recorder` steps are captured where
    they can be. Without places nothing is remembered, and only `losses` can be asked for.
    """

    def __init__(
        self, model: Model, sequences: int, places: int, recorder: Recorder | None = None
    ) -> None:
        self.model = model
        self.run = model.plan.run
        self.sequences = sequences
        self.tp = model.groups.layout.tp
        self.dtype = DTYPES[self.run.precision.params]
        places = padded(places, self.tp)
        sizes = CacheSizes(sequences, places, self.dtype, device=model.device)
        self.sizes = sizes
        self.cached = [CachedChunk(chunk, sizes) for chunk in model.chunks]
        self.rows = padded(sequences, self.tp)  # T
        self.eager = why_eager(self.run, model.chunks, self.rows // self.tp, model.device)
        self.steps: list[Callable[[Tensor], Tensor]] = [
            self._step_of(cached, recorder) for cached in self.cached
        ]
        # of the next token of each sequence; of rows that are none: 0
        self.place_T = torch.zeros(self.rows, dtype=torch.int64, device=model.device)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's memory of keys and values."""
        return sum(cached.nbytes for cached in self.cached)

    @torch.no_grad()
    def prompts(self, prompts: Sequence[Sequence[int]], width: int = 0) -> Tensor:
        """Begin anew with B prompts: the logits behind each, fp32 B × V, on every rank of the
        replica. They are filled up to the longest, and to `width`.
        """
        length_B = torch.tensor([len(prompt) for prompt in prompts], device=self.model.device)
        tokens_BP = self._filled(prompts, width)
        assert tokens_BP.shape[1] <= self.sizes.places, "prompts fit the memory"
        self.place_T[: self.sequences] = length_B
        x_BsD = self._prompts(tokens_BP)
        return self._logits(
            lambda: self.model.chunks[-1].logits(self._last_tokens(x_BsD, length_B))
        )

    @torch.no_grad()
    def losses(self, texts: Sequence[Sequence[int]], width: int = 0) -> Tensor:
        """What B texts lack: nats of each token given all before it, fp32 B × P, 0 for the first
        and behind the end; on every rank of the replica. Forgets prompts. Filled up as prompts.
        """
        tokens_BP = self._filled(texts, width)
        labels_BP = torch.full_like(tokens_BP, NO_LABEL)
        for sequence, text in enumerate(texts):
            labels_BP[sequence, : len(text) - 1] = tokens_BP[sequence, 1 : len(text)]
        x_BsD = self._prompts(tokens_BP)
        pipeline = self.model.plan.stages.pipeline
        nats_BP = torch.zeros(tokens_BP.shape, dtype=torch.float32, device=self.model.device)
        if pipeline.rank(pipeline.last) == self.model.groups.pp_rank:
            nats_BP[:, 1:] = self.model.chunks[-1].losses(x_BsD, labels_BP)[:, :-1]
        all_reduce(nats_BP, self.model.groups.pp)  # zero but for the last stage
        return nats_BP

    def _filled(self, texts: Sequence[Sequence[int]], width: int) -> Tensor:
        """B texts behind each other, filled up to P: int64 B × P."""
        assert len(texts) == self.sequences, "memory is for this many"
        assert all(texts), "each has a token"
        width = padded(max(width, *map(len, texts)), self.tp)
        filled = [[*text, *[FILLING] * (width - len(text))] for text in texts]
        return torch.tensor(filled, device=self.model.device)

    def _prompts(self, tokens_BP: Tensor) -> Tensor:
        """What comes out of the last stage, on its ranks: B × s × D, s = P / tp."""
        width = tokens_BP.shape[1]
        place_1P = torch.arange(width, device=self.model.device)[None]
        hidden = torch.Size((self.sequences, width // self.tp, self.run.model.hidden_size))
        with self.model.all_rows():
            return self._stages(
                tokens_BP, hidden, lambda nth, x: self.cached[nth].prompts(x, place_1P)
            )

    @torch.no_grad()
    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """One more token of each sequence: the logits behind it, fp32 B × V, on every rank."""
        tokens_1T = torch.full((1, self.rows), FILLING, device=self.model.device)
        tokens_1T[0, : self.sequences] = torch.as_tensor(tokens)
        hidden = torch.Size((1, self.rows // self.tp, self.run.model.hidden_size))
        columns_1TV = self._stages(tokens_1T, hidden, lambda nth, x: self.steps[nth](x))
        logits_BV = self._logits(lambda: columns_1TV)
        self.place_T[: self.sequences] += 1
        return logits_BV

    def _step_of(
        self, cached: CachedChunk, recorder: Recorder | None
    ) -> Callable[[Tensor], Tensor]:
        """The step of a chunk: behind the last stage's, logits."""
        if recorder is not None and self.eager is None:
            return CapturedStep(lambda x: self._step(cached, x), recorder)

        def eagerly(x: Tensor) -> Tensor:
            with self.model.all_rows():
                return self._step(cached, x)

        return eagerly

    def _step(self, cached: CachedChunk, x: Tensor) -> Tensor:
        following = NextToken.at(self.place_T[: self.sequences], self.sizes)
        x_1tD = cached.step(x, self.place_T[None], following)
        return cached.chunk.logits(x_1tD) if cached.chunk.last else x_1tD

    def _stages(
        self, tokens: Tensor, hidden: torch.Size, compute: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Through all stages one after the other; on ranks of the last one what comes out of it.
        `compute`: this rank's n-th chunk.
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
                _exchange(dist.isend, x.contiguous(), ranks[following], group=groups.pp)
            elif following != owner and here == following:
                x = torch.empty(hidden, dtype=self.dtype, device=self.model.device)
                _exchange(dist.irecv, x, ranks[owner], group=groups.pp)
        return x

    def _last_tokens(self, x_BsD: Tensor, length_B: Tensor) -> Tensor:
        """This rank's share of the rows of the last tokens of prompts: 1 × t × D, t = T / tp."""
        groups = self.model.groups
        x_BPD = gather_tokens(x_BsD, groups.tp)
        sequence_B = torch.arange(self.sequences, device=x_BPD.device)
        last_TD = x_BPD.new_zeros(self.rows, x_BPD.shape[2])
        last_TD[: self.sequences] = x_BPD[sequence_B, length_B - 1]
        return last_TD.chunk(self.tp)[groups.coords.tp[0]][None]

    def _logits(self, columns: Callable[[], Tensor]) -> Tensor:
        """Logits of B tokens on every rank; `columns`: the last stage's, 1 × T × V / tp."""
        groups = self.model.groups
        pipeline = self.model.plan.stages.pipeline
        shape = self.sequences, self.tp, self.run.model.vocab_size // self.tp
        logits = torch.zeros(shape, dtype=torch.float32, device=self.model.device)
        if pipeline.rank(pipeline.last) == groups.pp_rank:
            logits[:, groups.coords.tp[0]] = columns()[0, : self.sequences].float()
        # every number is on one rank of these, and zero on the others
        for group in (groups.tp, groups.pp):
            all_reduce(logits, group)
        return logits.flatten(1)


def _exchange(
    operation: Callable[..., Any], tensor: Tensor, peer: int, *, group: dist.ProcessGroup
) -> None:
    # As a batch of one: NCCL makes a communicator for every two ranks, and warns of it, otherwise.
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)]):
        work.wait()
