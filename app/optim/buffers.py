"""Contiguous parameter and gradient buffers of a chunk, in equal shards over ranks.

`app.plan.shards` plans the layout: parameters in reverse order of use (the order in which their
gradients arrive), in buckets padded so that every rank owns an equal shard of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.plan.model.weight import Weight
from app.plan.sharding.reshard import Block
from app.plan.shards import BufferLayout


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Parameter with its identity in the whole model."""

    name: str  # global name, the same in every layout
    param: nn.Parameter
    expert: bool  # belongs to routed experts
    decay: bool  # weight decay applies
    block: Block  # block of the global parameter that this rank holds
    tied: bool = False  # other stages hold copies; their gradients are summed
    # every tensor-parallel rank holds all of it; their gradients are summed
    replicated: bool = False
    counted: bool = True  # the copy that counts in norms and is saved
    # record of the global parameter; None for parameters that are no model's
    weight: Weight | None = None


class FlatBuffer:
    """Parameters of one dtype and kind (dense or expert) as views of one tensor; main gradients
    likewise, in `grads`. If both have one dtype, autograd accumulates into the main gradients
    itself.
    """

    def __init__(
        self, specs: Sequence[ParamSpec], layout: BufferLayout, grads: torch.dtype
    ) -> None:
        assert [stop - start for start, stop in layout.params] == [
            spec.param.numel() for spec in specs
        ], "planned otherwise"
        self.specs = tuple(specs)
        self.layout = layout
        first = specs[0].param
        self.params = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.layout.numel, dtype=grads, device=first.device)
        # autograd adds to the gradient sums in place; otherwise they have more bits
        self.autograd_adds = self.params.dtype == self.grads.dtype
        for (spec, grad), (start, stop) in zip(self.grad_views(), layout.params, strict=True):
            value = self.params[start:stop].view_as(spec.param)
            spec.param.data = value.copy_(spec.param.detach())
            if self.autograd_adds:
                spec.param.grad = grad

    def grad_views(self) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Yield every parameter with its main gradient, in the parameter's shape."""
        for spec, (start, stop) in zip(self.specs, self.layout.params, strict=True):
            yield spec, self.grads[start:stop].view_as(spec.param)

    def of_bucket(self, bucket: int) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Yield the parameters of one bucket with their main gradients."""
        return (
            view
            for view, number in zip(self.grad_views(), self.layout.bucket_of, strict=True)
            if number == bucket
        )
