"""Frozen linear layers whose weights are held in fewer bits, and dequantised for each GEMM.

| kind | a value | a scale, fp32 |
|---|---|---|
| `fp8` | e4m3 | per 128 values: the largest magnitude / 448 |
| `nf4` | one of 16 quantiles of a normal distribution | per 64: the largest magnitude |

Blocks are consecutive values of the last dimension. Values are scaled in fp32 and rounded once, to
the type of the GEMMs. NF4 is of QLoRA (arXiv 2305.14314); its values, blocks and order of
nibbles are those of bitsandbytes.

`app.model.lora.hold_base` replaces weights and back ends when a run is built; backward saves what
is held and dequantises it again. Shapes as in `app.model.layers.linear`; N blocks of L values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.choices import BaseKind
from app.model.layers.layer_groups import OptionalGroup, gather_tokens
from app.model.layers.linear import GroupedLinearBackend, TorchGroupedLinear, TorchLinear
from app.model.layers.weight_grads import ComputedGrad, WeightGrad, WeightGradSink
from app.plan.model.held import BLOCKS

E4M3, SCALES = torch.float8_e4m3fn, torch.float32
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


class Held(ABC):
    """Form of one weight: its scales, and how its values come back."""

    kind: BaseKind

    def __init__(self, values: Tensor) -> None:
        """Quantise; `values` may be of any floating type. `codes` is then what the weight holds."""
        self.dtype = values.dtype
        blocks_NL = values.detach().to(SCALES).unflatten(-1, (-1, BLOCKS[self.kind]))
        self.scales_N, self.codes = self._quantised(blocks_NL)

    @abstractmethod
    def _quantised(self, blocks_NL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale of each block, and all codes."""

    @abstractmethod
    def restored(self, codes: Tensor) -> Tensor:
        """Return the weight, dequantised."""


class HeldFp8(Held):
    """Values in e4m3."""

    kind = BaseKind.fp8

    def _quantised(self, blocks_NL: Tensor) -> tuple[Tensor, Tensor]:
        scales_N = blocks_NL.abs().amax(-1) / torch.finfo(E4M3).max
        safe_N1 = scales_N.masked_fill(scales_N == 0, 1)[..., None]
        return scales_N, (blocks_NL / safe_N1).to(E4M3).flatten(-2)

    def restored(self, codes: Tensor) -> Tensor:
        """See `Held`."""
        values = codes.to(self.dtype)  # exact
        values.unflatten(-1, (-1, BLOCKS[self.kind])).mul_(self.scales_N[..., None])
        return values


class HeldNf4(Held):
    """Values as places in a table, two per byte: the first in the upper half."""

    kind = BaseKind.nf4

    def _quantised(self, blocks_NL: Tensor) -> tuple[Tensor, Tensor]:
        table = blocks_NL.new_tensor(NF4)
        # both values of every byte
        self.pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1)
        scales_N = blocks_NL.abs().amax(-1)
        safe_N1 = scales_N.masked_fill(scales_N == 0, 1)[..., None]
        between = (table[1:] + table[:-1]) / 2
        places = torch.bucketize(blocks_NL / safe_N1, between).to(torch.uint8).flatten(-2)
        high, low = places.unflatten(-1, (-1, 2)).unbind(-1)
        return scales_N, (high << 4) | low

    def restored(self, codes: Tensor) -> Tensor:
        """See `Held`."""
        values = self.pairs.index_select(0, codes.flatten().int())
        values = values.view(*self.scales_N.shape, BLOCKS[self.kind])
        return values.mul_(self.scales_N[..., None]).flatten(-2).to(self.dtype)


KINDS: dict[BaseKind, type[Held]] = {BaseKind.fp8: HeldFp8, BaseKind.nf4: HeldNf4}


class HeldLinear(TorchLinear):
    """torch's GEMMs with a weight that is held in fewer bits and has no gradient."""

    def __init__(self, held: Held) -> None:
        self.held = held

    def linear(
        self,
        x_BsI: Tensor,
        weight_OI: nn.Parameter,
        group: OptionalGroup,
        sink: WeightGradSink | None,
    ) -> Tensor:
        """See the protocol."""
        return self.output(gather_tokens(x_BsI, group), weight_OI)

    def output(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """See the protocol."""
        out: Tensor = _HeldLinear.apply(x, weight_OI, self.held)
        return out

    def input_grad(self, grad: Tensor, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
        """See `TorchLinear`."""
        return torch.matmul(grad, self.held.restored(weight_OI), out=out)

    def weight_grad(self, grad: Tensor, x: Tensor) -> WeightGrad:
        """Return a zero, which nothing adds to a gradient."""
        return ComputedGrad(grad.new_zeros(()))


class _HeldLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, held: Held) -> Tensor:
        ctx.weight_OI, ctx.held = weight_OI, held
        return F.linear(x, held.restored(weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        held: Held = ctx.held
        return grad @ held.restored(ctx.weight_OI), None, None


class HeldGroupedLinear:
    """Grouped GEMMs with weights that are held in fewer bits and have no gradient."""

    differentiable = False
    input_grad_first = False

    def __init__(self, held: Held) -> None:
        self.held = held
        self.gemms: GroupedLinearBackend = TorchGroupedLinear()

    def output(self, rows_TI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        return self.gemms.output(rows_TI, self.held.restored(weight_EIO), ends_E)

    def input_grad(self, grad_TO: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        return self.gemms.input_grad(grad_TO, self.held.restored(weight_EIO), ends_E)

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """Only trained weights have one."""
        raise AssertionError("a weight that is held in fewer bits is not trained")
