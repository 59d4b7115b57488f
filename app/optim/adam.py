"""AdamW on this rank's shard of one bucket, in fp32; its moments may be stored in bf16.

Decoupled weight decay differs per parameter. On GPUs one kernel updates a shard
(`app.kernels.adamw`), elsewhere torch's fused AdamW, in two groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from app.choices import OptimizerKind
from app.config import OptimConfig
from app.kernels.adamw import AdamWSettings, ShardSlices, adamw_update
from app.kernels.common import usable
from app.optim.buffers import FlatBuffer, ParamSpec
from app.optim.shard import OptimizerGroups, ParamShard, Shard
from app.plan.shards import Range


@dataclass(frozen=True, slots=True)
class AdamParamShard(ParamShard):
    """Part of one parameter, with AdamW's count."""

    step: Tensor  # scalar: updates so far


class AdamShard(Shard):
    """Shard that AdamW updates, element by element."""

    kind: ClassVar[OptimizerKind] = OptimizerKind.adamw
    param_shards: tuple[AdamParamShard, ...]

    def __init__(
        self,
        buffer: FlatBuffer,
        bucket: int,
        group: dist.ProcessGroup,
        moments: torch.dtype | None = None,
    ) -> None:
        super().__init__(buffer, bucket, group, moments)
        self.exp_avg, self.exp_avg_sq = self.moments["exp_avg"], self.moments["exp_avg_sq"]
        ranges = (
            (*part.local, owned.spec.decay)
            for part, owned in zip(self.ranges, self.param_shards, strict=True)
        )
        self._slices = ShardSlices.of(ranges, self.main.device)

    @property
    def shards(self) -> tuple[Self]:
        """Return this shard, which is updated alone."""
        return (self,)

    @classmethod
    def updates(
        cls, shards: Sequence[Self], config: OptimConfig, groups: OptimizerGroups
    ) -> Sequence[Self]:
        """Return the shards."""
        return shards

    def _param_shard(self, spec: ParamSpec, part: Range) -> AdamParamShard:
        owned = super()._param_shard(spec, part)
        count = torch.zeros((), device=self.main.device)
        return AdamParamShard(
            spec, owned.start, owned.main, grad=owned.grad, moments=owned.moments, step=count
        )

    def restored(self, updates: int) -> None:
        """See `Shard.restored`; the next update counts from `updates`."""
        for owned in self.param_shards:
            owned.step.fill_(updates)
        super().restored(updates)

    def update(
        self,
        config: OptimConfig,
        rates_2: Tensor,
        grad_divisor: Tensor,
        skip: Tensor,
    ) -> None:
        """Run one AdamW step on grad / `grad_divisor`; no-op if `skip` is 1 (fp32 scalars).
        `rates_2`: see `update_rates`.
        """
        if not self.param_shards:
            return
        if usable(self.main, self.grad):
            settings = AdamWSettings(config.beta1, config.beta2, config.eps)
            self._update_at_once(settings, rates_2, grad_divisor, skip=skip)
            return
        lr, weight_decay = rates_2.tolist()
        for decays in (True, False):
            param_shards = [owned for owned in self.param_shards if owned.spec.decay == decays]
            if not param_shards:
                continue
            # fp32 moments themselves; of others wider copies
            first = [p.moments["exp_avg"].float() for p in param_shards]
            second = [p.moments["exp_avg_sq"].float() for p in param_shards]
            adamw(
                [p.main for p in param_shards],
                [p.grad.float() for p in param_shards],
                first,
                second,
                [],
                [p.step for p in param_shards],
                fused=True,
                grad_scale=grad_divisor,  # torch divides by it, and changes nothing if found_inf
                found_inf=skip,
                amsgrad=False,
                maximize=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=lr,
                weight_decay=weight_decay if decays else 0.0,
                eps=config.eps,
            )
            for owned, exp_avg, exp_avg_sq in zip(param_shards, first, second, strict=True):
                owned.moments["exp_avg"].copy_(exp_avg)
                owned.moments["exp_avg_sq"].copy_(exp_avg_sq)
        if self.main is not self.own_params:
            self.own_params.copy_(self.main)

    def _update_at_once(
        self, settings: AdamWSettings, rates_2: Tensor, grad_divisor: Tensor, *, skip: Tensor
    ) -> None:
        """Update the whole shard; all its parts must have seen equally many updates."""
        steps = [owned.step for owned in self.param_shards]
        adamw_update(
            self.main,
            self.grad,
            (self.exp_avg, self.exp_avg_sq),
            rounded_N=None if self.main is self.own_params else self.own_params,
            slices=self._slices,
            rates_2=rates_2,
            step=steps[0],
            divisor=grad_divisor,
            skip=skip,
            settings=settings,
        )
        # a list of tensors: torch would read a single one on the host, as a number
        torch._foreach_add_(steps, [1 - skip] * len(steps))
