"""Small pieces of the transformer: RMSNorm, rotary positions, SwiGLU.

Shapes: B sequences, S tokens per sequence, N heads, H head width, D hidden, F feed-forward hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.model.deferred import WeightQueue, linear


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang & Sennrich 2019); computed in fp32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any shape ending in `width` -> the same shape and dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Context:
    """What every layer of a chunk shares for one microbatch."""

    cos_BS1H: Tensor  # fp32; B may be 1
    sin_BS1H: Tensor
    mask_B1SS: Tensor | None  # True where a query may look at a key; None: plain causal
    repeatable: bool = True  # only kernels whose gradients repeat bit for bit
    later: WeightQueue | None = None  # where backward leaves the gradients of weights; None: it computes them


def layer_context(
    positions_BS: Tensor,
    documents_BS: Tensor | None,
    head_width: int,
    theta: float,
    repeatable: bool = True,
    later: WeightQueue | None = None,
) -> Context:
    """Rotary tables (Su et al. 2021, rotating the two halves of a head) and the document mask of a microbatch."""
    exponent = torch.arange(0, head_width, 2, device=positions_BS.device, dtype=torch.float32) / head_width
    angles_BSH = (positions_BS[..., None].float() * theta**-exponent).repeat(1, 1, 2)
    cos, sin = angles_BSH.cos()[:, :, None], angles_BSH.sin()[:, :, None]
    return Context(cos, sin, None if documents_BS is None else document_mask(documents_BS), repeatable, later)


def document_mask(documents_BS: Tensor) -> Tensor:
    """Causal mask that also keeps every query within its own document; bool, B × 1 × S × S."""
    size = documents_BS.shape[1]
    causal_SS = torch.ones(size, size, dtype=torch.bool, device=documents_BS.device).tril()
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    return (same_BSS & causal_SS)[:, None]


def rotate(x_BSNH: Tensor, context: Context) -> Tensor:
    """Apply rotary positions to every head."""
    half = x_BSNH.shape[-1] // 2
    turned = torch.cat((-x_BSNH[..., half:], x_BSNH[..., :half]), dim=-1)
    return (x_BSNH * context.cos_BS1H + turned * context.sin_BS1H).to(x_BSNH.dtype)


def swiglu(x: Tensor, w_up_2FD: nn.Parameter, w_down_DF: nn.Parameter, later: WeightQueue | None = None) -> Tensor:
    """silu(x·gate) · (x·up) · down (Shazeer 2020); the first half of `w_up_2FD` is the gate."""
    gate, up = linear(x, w_up_2FD, later).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, w_down_DF, later)


class Mlp(nn.Module):
    """SwiGLU feed-forward of a dense layer, or a shared expert."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w_up = nn.Parameter(torch.empty(2 * ffn, hidden))
        self.w_down = nn.Parameter(torch.empty(hidden, ffn))

    def forward(self, x: Tensor, later: WeightQueue | None = None) -> Tensor:
        """… × D -> … × D."""
        return swiglu(x, self.w_up, self.w_down, later)
