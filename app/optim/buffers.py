"""A chunk's parameters and gradients in contiguous buffers, cut into equal shards over ranks.

The layout is a value of `app.plan.shards`: parameters in reverse order of use (the order in which
their gradients arrive), in buckets that are padded so that every rank owns an equal shard of each.
"""

from __future__ import annotations

import weakref
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
    expert: bool  # lives on an expert-parallel rank
    decay: bool  # weight decay applies
    block: Block  # the part of the global parameter that this rank holds
    tied: bool = False  # other stages hold copies, whose gradients belong together
    shared: bool = False  # tensor-parallel ranks hold it whole, and their gradients belong together
    counted: bool = True  # the copy that counts in norms and is saved


class FlatBuffer:
    """One dtype's parameters of one kind (dense or expert), as views of one tensor; gradients
    likewise, in `grads`.

    `arrived(bucket)` is called whenever the gradient of one of its parameters has been added to.
    """

    def __init__(
        self, specs: Sequence[ParamSpec], layout: BufferLayout, grads: torch.dtype
    ) -> None:
        assert [stop - start for start, stop in layout.params] == [
            spec.param.numel() for spec in specs
        ], "planned otherwise"
        self.specs = tuple(specs)
        self.layout = layout
        self.arrived = ignore
        first = specs[0].param
        self.params = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.layout.numel, dtype=grads, device=first.device)
        places = zip(self.grad_views(), layout.params, layout.bucket_of, strict=True)
        for (spec, grad), (start, stop), bucket in places:
            value = self.params[start:stop].view_as(spec.param)
            self._adopt(spec.param, value, grad, bucket=bucket)

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

    def _adopt(self, param: nn.Parameter, value: Tensor, grad: Tensor, bucket: int) -> None:
        value.copy_(param.detach())
        param.data = value
        in_place = param.dtype == grad.dtype
        if in_place:
            param.grad = grad  # autograd adds in place
        # torch keeps hooks where the garbage collector does not see a cycle
        here = weakref.ref(self)

        def added(param: nn.Parameter) -> None:
            buffer = here()
            assert buffer is not None, "lives as long as its parameters are trained"
            if not in_place:
                if param.grad is None:  # backward has left it for later
                    return
                grad.add_(param.grad)
                param.grad = None
            buffer.arrived(bucket)

        param.register_post_accumulate_grad_hook(added)


def ignore(bucket: int) -> None:
    """The `arrived` of a buffer whose gradients nobody counts."""
