"""Parameters and gradients of a chunk in contiguous buffers, cut into equal shards for data parallelism.

The layout is a value of `app.plan.shards`: parameters in reverse order of registration (the order in which their
gradients arrive), padded so that every rank owns an equal shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.plan.shards import BufferLayout, buffer_layout

ALIGN = 64  # elements: every parameter starts where vector loads and grouped products can begin


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the whole model sees it."""

    name: str  # global name, the same in every layout
    param: nn.Parameter
    expert: bool  # lives on an expert-parallel rank
    decay: bool  # weight decay applies
    offset: int = 0  # first element of this rank's part within the flattened global parameter
    first_expert: int | None = None  # global index of the first expert in a stacked expert parameter


class FlatBuffer:
    """One dtype's parameters of one kind (dense or expert), as views of one tensor; gradients likewise in fp32."""

    def __init__(self, specs: Sequence[ParamSpec], world: int) -> None:
        self.specs = tuple(specs)
        numels = [spec.param.numel() for spec in specs]
        self.layout: BufferLayout = buffer_layout(numels, world, param_align=ALIGN, shard_align=ALIGN)
        first = specs[0].param
        self.params = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.layout.numel, dtype=torch.float32, device=first.device)
        for spec, (start, _) in zip(self.specs, self.layout.params, strict=True):
            self._adopt(spec.param, start)

    def _adopt(self, param: nn.Parameter, start: int) -> None:
        value = self.params[start : start + param.numel()].view_as(param)
        value.copy_(param.detach())
        param.data = value
        grad = self.grads[start : start + param.numel()].view_as(param)
        if param.dtype == torch.float32:
            param.grad = grad  # autograd adds in place
        else:
            param.register_post_accumulate_grad_hook(_accumulate_into(grad))


def _accumulate_into(grad: Tensor) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        assert param.grad is not None
        grad.add_(param.grad)
        param.grad = None

    return hook
