"""Parameters and gradients of a chunk in contiguous buffers, cut into equal shards for data parallelism.

The layout is a value of `app.plan.shards`: parameters in reverse order of registration (the order in which their
gradients arrive), padded so that every rank owns an equal shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.plan.shards import BufferLayout


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the whole model sees it."""

    name: str  # global name, the same in every layout
    param: nn.Parameter
    expert: bool  # lives on an expert-parallel rank
    decay: bool  # weight decay applies
    offset: int = 0  # first element of this rank's part within the flattened global parameter
    first_expert: int | None = None  # global index of the first expert in a stacked expert parameter
    tied: bool = False  # other stages hold copies, whose gradients belong together
    counted: bool = True  # the copy that counts in norms and is saved


class FlatBuffer:
    """One dtype's parameters of one kind (dense or expert), as views of one tensor; gradients likewise in fp32."""

    def __init__(self, specs: Sequence[ParamSpec], layout: BufferLayout) -> None:
        assert [stop - start for start, stop in layout.params] == [spec.param.numel() for spec in specs], "planned otherwise"
        self.specs, self.layout = tuple(specs), layout
        first = specs[0].param
        self.params = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.layout.numel, dtype=torch.float32, device=first.device)
        self.tied = tuple(grad for spec, grad in self.grad_views() if spec.tied)
        for (spec, grad), (start, stop) in zip(self.grad_views(), self.layout.params, strict=True):
            self._adopt(spec.param, self.params[start:stop].view_as(spec.param), grad)

    def grad_views(self) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Every parameter with its gradient sum, in the parameter's shape."""
        places = zip(self.specs, self.layout.params, strict=True)
        return ((spec, self.grads[start:stop].view_as(spec.param)) for spec, (start, stop) in places)

    def _adopt(self, param: nn.Parameter, value: Tensor, grad: Tensor) -> None:
        value.copy_(param.detach())
        param.data = value
        if param.dtype == torch.float32:
            param.grad = grad  # autograd adds in place
        else:
            param.register_post_accumulate_grad_hook(_accumulate_into(grad))


def _accumulate_into(grad: Tensor) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        if param.grad is not None:  # None: backward has left it for later
            grad.add_(param.grad)
            param.grad = None

    return hook
