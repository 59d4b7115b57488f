"""AdamW on this rank's shard of one bucket, in fp32.

The shard is a contiguous part of the buffer; a parameter that crosses a shard boundary is updated
in parts, each on the rank that owns it (`ParamShard`). Decoupled weight decay differs per
parameter. On GPUs one kernel updates a shard (`app.kernels.adamw`), elsewhere torch's fused AdamW,
in two groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from app.config import OptimConfig
from app.kernels.adamw import AdamWSettings, ShardSlices, adamw_update
from app.kernels.common import usable
from app.optim.buffers import FlatBuffer, ParamSpec
from app.plan.shards import Range


@dataclass(frozen=True, slots=True)
class ParamShard:
    """Part of one parameter that this rank owns, as views of the shard."""

    spec: ParamSpec
    start: int  # first element within the flattened local parameter
    main: Tensor  # fp32 parameter
    grad: Tensor  # in the dtype of the gradient buffer
    exp_avg: Tensor  # first moment
    exp_avg_sq: Tensor  # second moment
    step: Tensor  # scalar: updates so far

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the tensors of this part that a checkpoint holds."""
        return {"main": self.main, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


class AdamShard:
    """fp32 parameters, moments and gradients of the part of a bucket that this rank owns.

    In fp32 training the parameters are the buffer itself, otherwise an fp32 copy. The gradients are
    a view of this rank's part of the gradient buffer.
    """

    def __init__(self, buffer: FlatBuffer, bucket: int, group: dist.ProcessGroup) -> None:
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
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.main), torch.zeros_like(self.main)
        parts = list(self._parts(group.rank()))
        self.param_shards = tuple(self._param_shard(spec, part) for spec, part in parts)
        ranges = ((*part.local, spec.decay) for spec, part in parts)
        self._slices = ShardSlices.of(ranges, self.main.device)
        specs = [spec for spec, _ in buffer.of_bucket(bucket)]
        self.tied = any(spec.tied for spec in specs)
        assert not self.tied or len(specs) == 1, "a tied parameter has a bucket of its own"

    def _parts(self, rank: int) -> Iterator[tuple[ParamSpec, Range]]:
        for spec, ranges in zip(self.buffer.specs, self.buffer.layout.ranges(rank), strict=True):
            yield from ((spec, part) for part in ranges if part.bucket == self.bucket)

    def _param_shard(self, spec: ParamSpec, part: Range) -> ParamShard:
        own = slice(*part.local)
        return ParamShard(
            spec,
            part.param[0],
            self.main[own],
            grad=self.grad[own],
            exp_avg=self.exp_avg[own],
            exp_avg_sq=self.exp_avg_sq[own],
            step=torch.zeros((), device=self.main.device),
        )

    def counted_grads(self) -> list[Tensor]:
        """Return the gradient parts that count in norms, merged where contiguous."""
        if all(owned.spec.counted for owned in self.param_shards):
            return [self.grad]
        return [owned.grad for owned in self.param_shards if owned.spec.counted]

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
            adamw(
                [p.main for p in param_shards],
                [p.grad.float() for p in param_shards],
                [p.exp_avg for p in param_shards],
                [p.exp_avg_sq for p in param_shards],
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
