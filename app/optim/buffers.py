"""A chunk's parameters and gradients in contiguous buffers, cut into equal shards over ranks.

The layout is a value of `app.plan.shards`: parameters in reverse order of use (the order in which
their gradients arrive), in buckets that are padded so that every rank owns an equal shard of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.plan.sharding.reshard import Block
from app.plan.shards import BufferLayout


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the whole model sees it."""

    name: str  # global name, the same in every layout
    param: nn.Parameter
    expert: bool  # belongs to routed experts
    decay: bool  # weight decay applies
    block: Block  # the part of the global parameter that this rank holds
    tied: bool = False  # other stages hold copies, whose gradients belong together
    # tensor-parallel ranks hold it whole, and their gradients belong together
    replica: bool = False
    counted: bool = True  # the copy that counts in norms and is saved


class FlatBuffer:
    """One dtype's parameters of one kind (dense or expert), as views of one tensor; gradient sums
    likewise, in `grads`. Where both are of one type, autograd adds to the sums itself.
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
        """Every parameter with its gradient sum, in the parameter's shape."""
        for spec, (start, stop) in zip(self.specs, self.layout.params, strict=True):
            yield spec, self.grads[start:stop].view_as(spec.param)

    def of_bucket(self, bucket: int) -> Iterator[tuple[ParamSpec, Tensor]]:
        """The parameters of one bucket, with their gradient sums."""
        return (
            view
            for view, number in zip(self.grad_views(), self.layout.bucket_of, strict=True)
            if number == bucket
        )
