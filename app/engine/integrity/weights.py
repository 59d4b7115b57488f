"""Compare the weights of ranks that hold the same ones.

Every bucket of parameters is owned in parts: a rank updates its part in fp32, rounds it, and sends
it to the others. What all ranks hold of a part must be what its owner would send now. Weights that
are not trained must stay as they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_gather
from app.engine.integrity.bits import bits_of
from app.engine.step.engine import Engine
from app.optim.shard import Shard


@dataclass(frozen=True, slots=True)
class WrongWeights:
    """Parts of the weights in which ranks differ."""

    ranks: tuple[int, ...]  # global; those that may be at fault
    names: tuple[str, ...]  # of the parameters in the first such part

    def __str__(self) -> str:
        """Describe the weights."""
        more = f" to {self.names[-1]}" if len(self.names) > 1 else ""
        return f"its weights {self.names[0]}{more}"


@dataclass(slots=True)
class Weights:
    """Weights of a rank, compared on all ranks together."""

    engine: Engine
    frozen: tuple[int, ...] = field(default_factory=tuple)  # sums when they were first seen

    def wrong(self) -> list[WrongWeights]:
        """Return the parts in which this rank sees a difference. The parameters are gathered."""
        return [*self._parts(), *self._replicated(), *self._changed()]

    def _parts(self) -> Iterator[WrongWeights]:
        """Compare what the ranks hold of every bucket with each other, and each owner's part with
        what it would send; part by part where there is a difference.
        """
        for group, shards in self._by_group().items():
            sums = [
                torch.stack([bits_of(shard.params), bits_of(shard.own_params), _due(shard)])
                for shard in shards
            ]
            every_RSK = _gathered(torch.stack(sums).flatten(), group).view(-1, len(shards), 3)
            for shard, every_RK in zip(shards, every_RSK.unbind(1), strict=True):
                whole_R, own_R, due_R = every_RK.unbind(1)
                if (whole_R != whole_R[0]).any() or (own_R != due_R).any():
                    yield from self._wrong_parts(shard, due_R.tolist())

    def _wrong_parts(self, shard: Shard, due: list[int]) -> Iterator[WrongWeights]:
        group = shard.group
        held = torch.stack([bits_of(part) for part in shard.params.chunk(group.size())])
        every_RO = _gathered(held, group)
        ranks = dist.get_process_group_ranks(group)
        apart = shard.main is not shard.own_params
        for owner, seen_R in enumerate(every_RO.unbind(1)):
            if wrong := wrong_holders(seen_R.tolist(), due[owner], owner, apart):
                yield WrongWeights(tuple(ranks[each] for each in wrong), _names(shard))

    def _by_group(self) -> dict[dist.ProcessGroup, list[Shard]]:
        found: dict[dist.ProcessGroup, list[Shard]] = {}
        for shard in self.engine.optimizer.all_shards():
            found.setdefault(shard.group, []).append(shard)
        return found

    def _replicated(self) -> Iterator[WrongWeights]:
        """Compare dense parameters that all tensor-parallel ranks hold."""
        group = self.engine.groups.tp
        shared = [
            owned
            for owned in self.engine.optimizer.param_shards()
            if owned.spec.replicated and not owned.spec.expert
        ]
        if group.size() == 1 or not shared:
            return
        seen_RP = _gathered(torch.stack([bits_of(owned.main) for owned in shared]), group)
        ranks = dist.get_process_group_ranks(group)
        for place, owned in enumerate(shared):
            if wrong := minority(seen_RP[:, place].tolist()):
                yield WrongWeights(tuple(ranks[each] for each in wrong), (owned.spec.name,))

    def _changed(self) -> Iterator[WrongWeights]:
        """Compare weights that are not trained with what they were."""
        sums = tuple(int(bits_of(each.spec.param)) for each in self.engine.frozen)
        known, self.frozen = self.frozen or sums, self.frozen or sums
        for each, before, now in zip(self.engine.frozen, known, sums, strict=True):
            if before != now:
                yield WrongWeights((self.engine.groups.rank,), (each.spec.name,))


def _names(shard: Shard) -> tuple[str, ...]:
    return tuple(spec.name for spec, _ in shard.buffer.of_bucket(shard.bucket))


def _gathered(sums_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sums of all ranks of a group on the host, R × N."""
    every_RN = sums_N.new_empty((group.size(), len(sums_N)))
    all_gather(every_RN, sums_N, group)
    return every_RN.cpu()


def _due(shard: Shard) -> Tensor:
    """Return the sum over the bits that the owner would send."""
    return bits_of(shard.main.to(shard.own_params.dtype))


def wrong_holders(seen: Sequence[int], due: int, owner: int, apart: bool) -> list[int]:
    """Return the ranks that hold a part of the weights wrongly, or may.

    `seen[r]` is what rank r holds, `due` what the owner would send; `apart`: it is made from memory
    of its own, so that it bears out what the owner holds.
    """
    others = [rank for rank, value in enumerate(seen) if value != due]
    if not others:
        return []
    if owner in others:
        return [owner]
    if apart:
        return others
    if len(seen) == 2:
        return [0, 1]
    rest = {value for rank, value in enumerate(seen) if rank != owner}
    return [owner] if len(rest) == 1 else others


def minority(seen: Sequence[int]) -> list[int]:
    """Return the ranks whose value is not that of most; all if no value is."""
    most, count = Counter(seen).most_common(1)[0]
    if 2 * count > len(seen):
        return [rank for rank, value in enumerate(seen) if value != most]
    return [*range(len(seen))]
