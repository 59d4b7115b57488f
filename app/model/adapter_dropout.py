"""Dropout of the inputs of adapters: a mask per linear layer, of a hash instead of drawn numbers.

Whether a value is kept depends on the seed, the number of updates, the adapter, the sequence's
place in the global batch, the token's position and the channel alone. Every layout therefore drops
the same values, a resumed run continues with the masks of the run before, recomputation and
backward repeat those of forward, and none is stored. Graphs read the keys of the microbatch from
memory that is filled before each of its passes.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s of them here, I channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from app.kernels.hashed_dropout import dropped, mixed, most_of
from app.model.block import StepState


class AdapterDropout(StepState):
    """Keys of the tokens of the microbatch at work, and what its masks depend on besides."""

    def __init__(
        self,
        rate: float,
        seed: int,
        tokens: Tensor,
        *,
        sequences: int,
        replica: tuple[int, int],
    ) -> None:
        """`tokens`: positions of this rank's tokens, int64 [S]; `sequences`: of a microbatch;
        `replica`: this rank's data-parallel index, and how many there are.
        """
        self.keep = 1 - rate
        self.most = most_of(self.keep)
        self.seed = seed
        self.sequences = sequences
        self.replica = replica
        self.active = False  # within training passes
        self.updates = torch.zeros((), dtype=torch.int32, device=tokens.device)
        self.positions_S = tokens.to(torch.int32)
        self.keys_BS = self.positions_S.new_zeros(sequences, len(tokens))

    def channels(self, name: str, first: int, count: int) -> Tensor:
        """Return the keys of an adapter's channels from `first` on, int32 [count]."""
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=4).digest()
        own = int.from_bytes(digest, "big", signed=True)
        numbers = torch.arange(first, first + count, dtype=torch.int32)
        return mixed(mixed(numbers) ^ own).to(self.keys_BS.device)

    def start(self, microbatch: int) -> None:
        """Fill the keys of a microbatch's tokens, before a forward or backward of it."""
        index, replicas = self.replica
        first = (microbatch * replicas + index) * self.sequences
        numbers_B = torch.arange(
            first, first + self.sequences, dtype=torch.int32, device=self.keys_BS.device
        )
        sequences_B = mixed(mixed(self.updates.clone()) + numbers_B)
        self.keys_BS.copy_(mixed(sequences_B[:, None] + self.positions_S))

    @contextmanager
    def during(self, *, training: bool) -> Iterator[None]:
        """Have adapters drop inputs within the block, if it is one of training."""
        self.active = training
        try:
            yield
        finally:
            self.active = False

    def dropped(self, x_BsI: Tensor, first: int, channels_I: Tensor) -> Tensor:
        """Return x with zeros in place of what is dropped; not scaled. `first`: token of the rank
        that x begins with.
        """
        keys_Bs = self.keys_BS[:, first : first + x_BsI.shape[1]]
        return dropped(x_BsI, keys_Bs, channels_I, self.most)

    def finish_step(self, skipped: Tensor) -> None:
        """Count the update."""
        self.updates += skipped == 0

    def restored(self, updates: int) -> None:
        """Continue after so many updates."""
        self.updates.fill_(updates)
