"""This rank's shard of one bucket: main parameters, gradients and an optimizer's moments.

The shard is a contiguous part of the buffer; a parameter that crosses a shard boundary is updated
in parts, each on the rank that owns it (`ParamShard`). A subclass per optimizer updates shards,
each alone or several together (`Shard.updates`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from app.choices import OptimizerKind
from app.config import OptimConfig
from app.optim.buffers import FlatBuffer, ParamSpec
from app.plan.sharding.optimizers import PLANNED
from app.plan.shards import Range


@dataclass(frozen=True, slots=True)
class OptimizerGroups:
    """Process groups of the optimizer, by the names in `app.plan.groups`."""

    dp_cp: dist.ProcessGroup  # ranks that hold the same dense parameters
    edp: dist.ProcessGroup  # ranks that hold the same experts
    tp: dist.ProcessGroup  # tensor-parallel ranks
    embedding: dist.ProcessGroup  # the two ranks that hold copies of tied embeddings
    # ranks that together hold all experts; None where no optimizer updates whole matrices
    etp_ep: dist.ProcessGroup | None = None
    etp: tuple[int, ...] = (0,)  # ranks within `etp_ep` that hold parts of this rank's experts
    # these ranks; None where they share no parameter of experts
    etp_shared: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class ParamShard:
    """Part of one parameter that this rank owns, as views of the shard."""

    spec: ParamSpec
    start: int  # first element within the flattened local parameter
    main: Tensor  # fp32 parameter
    grad: Tensor  # in the dtype of the gradient buffer
    moments: Mapping[str, Tensor]  # state of the optimizer, by name in checkpoints

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the tensors of this part that a checkpoint holds."""
        return {"main": self.main, **self.moments}


class Update(Protocol):
    """Shards that are updated together."""

    @property
    def shards(self) -> Sequence[Shard]:
        """Return the shards."""

    def update(
        self, config: OptimConfig, rates_2: Tensor, grad_divisor: Tensor, skip: Tensor
    ) -> None:
        """Run one optimizer step on grad / `grad_divisor`; no-op if `skip` is 1 (fp32 scalars).
        `rates_2`: see `update_rates`.
        """


class Shard(ABC):
    """fp32 parameters, moments and gradients of the part of a bucket that this rank owns.

    In fp32 training the parameters are the buffer itself, otherwise an fp32 copy. The gradients are
    a view of this rank's part of the gradient buffer. `moments`: their dtype; None: that of the
    fp32 parameters.
    """

    kind: ClassVar[OptimizerKind]
    param_shards: tuple[ParamShard, ...]

    def __init__(
        self,
        buffer: FlatBuffer,
        bucket: int,
        group: dist.ProcessGroup,
        moments: torch.dtype | None = None,
    ) -> None:
        self.buffer = buffer
        self.bucket = bucket
        self.group = group
        own = slice(*buffer.layout.shard(bucket, group.rank()))
        whole = slice(*buffer.layout.buckets[bucket])
        self.own_params = buffer.params[own]
        self.params = buffer.params[whole]
        fp32 = self.own_params.dtype == torch.float32
        self.main = self.own_params if fp32 else self.own_params.float()
        self.grad = buffer.grads[own]
        self.moments = {
            name: torch.zeros_like(self.main, dtype=moments) for name in PLANNED[self.kind].moments
        }
        self.ranges = tuple(range_ for _, range_ in self._parts(group.rank()))
        self.param_shards = tuple(
            self._param_shard(spec, range_) for spec, range_ in self._parts(group.rank())
        )
        specs = [spec for spec, _ in buffer.of_bucket(bucket)]
        self.tied = any(spec.tied for spec in specs)
        assert not self.tied or len(specs) == 1, "a tied parameter has a bucket of its own"

    @classmethod
    @abstractmethod
    def updates(
        cls, shards: Sequence[Self], config: OptimConfig, groups: OptimizerGroups
    ) -> Sequence[Update]:
        """Return the updates of all these shards of this optimizer, in the order of use."""

    def _parts(self, rank: int) -> Iterator[tuple[ParamSpec, Range]]:
        for spec, ranges in zip(self.buffer.specs, self.buffer.layout.ranges(rank), strict=True):
            yield from ((spec, part) for part in ranges if part.bucket == self.bucket)

    def _param_shard(self, spec: ParamSpec, part: Range) -> ParamShard:
        own = slice(*part.local)
        moments = {name: moment[own] for name, moment in self.moments.items()}
        return ParamShard(spec, part.param[0], self.main[own], grad=self.grad[own], moments=moments)

    def counted_grads(self) -> list[Tensor]:
        """Return the gradient parts that count in norms, merged where contiguous."""
        if all(owned.spec.counted for owned in self.param_shards):
            return [self.grad]
        return [owned.grad for owned in self.param_shards if owned.spec.counted]

    def restored(self, updates: int) -> None:
        """Round main parameters that were filled from a checkpoint taken after `updates` updates
        to the model's own.
        """
        if self.main is not self.own_params:
            self.own_params.copy_(self.main)
