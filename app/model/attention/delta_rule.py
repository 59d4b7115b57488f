"""Gated delta rule (Yang et al. 2024, arXiv 2412.06464) and the short convolution before it.

A value head keeps a state S of K × V. Token t forgets and then corrects what S holds for its key:

    S ← exp(g_t) · S;  S ← S + k_t (β_t (v_t − Sᵀ k_t))ᵀ;  o_t = Sᵀ q_t / √K

with keys and queries of unit length. Tokens are computed in blocks of C: within one as a causal
matmul, between blocks by the state (section 3.3 there).

Documents of a sequence do not see each other: at a document's first token the state is forgotten by
exp(−50) = 2e-22, less than fp64 resolves, so that no offsets are read on the host.

Shapes: B sequences, S tokens, N blocks of C tokens; G key heads of width K, H value heads of width
V, H / G of them to a key head; F channels of W tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.kernels.common import usable
from app.kernels.short_convolution import short_convolution as convolution_kernel

BLOCK = 64  # tokens, as flash-linear-attention has
FORGETS = -50.0  # logarithm of what is left of the state at the first token of a document
UNIT_EPS = 1e-6  # added to the squared length of keys and queries, as flash-linear-attention does


class DeltaRule(Protocol):
    """Implementation of the gated delta rule over whole sequences."""

    def __call__(
        self,
        q_BSGK: Tensor,
        k_BSGK: Tensor,
        v_BSHV: Tensor,
        *,
        g_BSH: Tensor,
        beta_BSH: Tensor,
    ) -> Tensor:
        """Return the outputs B × S × H × V in the dtype of the values; g: fp32, 0 at most."""


def by_torch(
    q_BSGK: Tensor, k_BSGK: Tensor, v_BSHV: Tensor, *, g_BSH: Tensor, beta_BSH: Tensor
) -> Tensor:
    """Compute in fp32 by torch (`DeltaRule`); saves its inputs alone."""
    out_BSHV: Tensor = _DeltaRule.apply(q_BSGK, k_BSGK, v_BSHV, g_BSH, beta_BSH)
    return out_BSHV


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        q, k, v, g, beta = given
        return with_state(q, k, v, g_BSH=g, beta_BSH=beta)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHV: Tensor) -> tuple[Tensor, ...]:
        given = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        q, k, v, g, beta = given
        with torch.enable_grad():
            out_BSHV, _ = with_state(q, k, v, g_BSH=g, beta_BSH=beta)
        found: tuple[Tensor, ...] = torch.autograd.grad(out_BSHV, given, grad_BSHV)
        return found


def with_state(
    q_BSGK: Tensor,
    k_BSGK: Tensor,
    v_BSHV: Tensor,
    *,
    g_BSH: Tensor,
    beta_BSH: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the state behind the last token: fp32, B × H × K × V."""
    dtype, tokens = v_BSHV.dtype, v_BSHV.shape[1]
    block = min(BLOCK, tokens)
    q, k = (_per_value_head(unit(each), v_BSHV.shape[2]) for each in (q_BSGK, k_BSGK))
    q, k, v = (_blocks(each.float(), block) for each in (q * k.shape[-1] ** -0.5, k, v_BSHV))
    g, beta = (_blocks(each.float()[..., None], block) for each in (g_BSH, beta_BSH))
    since = g.cumsum(-2)  # logarithm of what is left since the block began: B × H × N × C × 1
    # A token's own place is a constant, as its difference is 0: strong decay leaves gradients that
    # would be lost in the rounding of two sums with this place.
    before_CC = torch.ones(block, block, dtype=torch.bool, device=g.device).tril(-1)
    itself_CC = torch.eye(block, dtype=since.dtype, device=g.device)
    left = (since - since.transpose(-1, -2)).masked_fill(~before_CC, -torch.inf).exp() + itself_CC
    # what each token writes, where tokens of the block correct each other
    system = (k * beta) @ k.transpose(-1, -2) * left
    writes, reads = (
        torch.linalg.solve_triangular(system, each, upper=False, unitriangular=True)
        for each in (v * beta, k * beta * since.exp())
    )
    inside = q @ k.transpose(-1, -2) * left
    q = q * since.exp()
    k = k * (since[..., -1:, :] - since).masked_fill(~before_CC[-1:].mT, 0).exp()
    kept = since[..., -1:, :].exp()
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for n in range(v.shape[2]):
        corrected = writes[:, :, n] - reads[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + inside[:, :, n] @ corrected)
        state = state * kept[:, :, n] + k[:, :, n].transpose(-1, -2) @ corrected
    out_BHSV: Tensor = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :tokens]
    return out_BHSV.transpose(1, 2).to(dtype), state


def unit(x: Tensor) -> Tensor:
    """Return vectors of unit length in the last dimension."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + UNIT_EPS)).to(x.dtype)


def one_token(
    q_BGK: Tensor,
    k_BGK: Tensor,
    v_BHV: Tensor,
    *,
    g_BH: Tensor,
    beta_BH: Tensor,
    state_BHKV: Tensor,
) -> Tensor:
    """Return the output of each sequence's next token, B × H × V, and update the state in place."""
    heads, dtype = v_BHV.shape[1], v_BHV.dtype
    q, k = (
        unit(each).float().repeat_interleave(heads // each.shape[1], dim=1)
        for each in (q_BGK, k_BGK)
    )
    state_BHKV.mul_(g_BH.float().exp()[..., None, None])
    held_BHV = torch.einsum("bhkv,bhk->bhv", state_BHKV, k)
    write_BHV = (v_BHV.float() - held_BHV) * beta_BH.float()[..., None]
    state_BHKV.add_(k[..., None] * write_BHV[..., None, :])
    out_BHV = torch.einsum("bhkv,bhk->bhv", state_BHKV, q) * q.shape[-1] ** -0.5
    narrow_BHV: Tensor = out_BHV.to(dtype)
    return narrow_BHV


def _per_value_head(x_BSGK: Tensor, heads: int) -> Tensor:
    return x_BSGK.repeat_interleave(heads // x_BSGK.shape[2], dim=2)


def _blocks(x_BSHK: Tensor, block: int) -> Tensor:
    """Return B × H × N × C × K, padded with tokens that write nothing and forget nothing."""
    lacking = -x_BSHK.shape[1] % block
    padded = F.pad(x_BSHK, (0, 0, 0, 0, 0, lacking)) if lacking else x_BSHK
    blocks: Tensor = padded.transpose(1, 2).unflatten(2, (-1, block))
    return blocks


def short_convolution(x_BSF: Tensor, taps_FW: Tensor, number_BS: Tensor | None) -> Tensor:
    """Return SiLU of each channel's weighted sum over the last W tokens, the latest tap last.

    number_BS: of the document of each token; tokens of others count as zeros. Computed in fp32;
    saves its inputs alone.
    """
    if usable(x_BSF, taps_FW):
        return convolution_kernel(x_BSF, taps_FW, number_BS)
    out_BSF: Tensor = _ShortConvolution.apply(x_BSF, taps_FW, number_BS)
    return out_BSF


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, taps_FW: Tensor, number_BS: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_BSF, taps_FW, number_BS)
        return F.silu(_summed(x_BSF, taps_FW, number_BS), inplace=True).to(x_BSF.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSF: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BSF, taps_FW, number_BS = ctx.saved_tensors
        summed_BSF = _summed(x_BSF, taps_FW, number_BS)
        grad_BSF = torch.ops.aten.silu_backward(grad_BSF.float(), summed_BSF)
        del summed_BSF
        grad_x_BSF, grad_taps = torch.zeros_like(grad_BSF), []
        for back, before_BSF in _before(x_BSF, taps_FW.shape[1], number_BS):
            tokens = before_BSF.shape[1]
            now_BSF = grad_BSF[:, back:]
            grad_taps.append((now_BSF * before_BSF).sum((0, 1)))
            given_BSF = now_BSF * taps_FW[:, -1 - back].float()
            if (ended_BS1 := _ended(back, number_BS)) is not None:
                given_BSF.masked_fill_(ended_BS1, 0)
            grad_x_BSF[:, :tokens] += given_BSF
            del given_BSF  # before the next one
        lacking = taps_FW.shape[1] - len(grad_taps)
        grad_FW = F.pad(torch.stack(grad_taps[::-1], dim=1), (lacking, 0))
        return grad_x_BSF.to(x_BSF.dtype), grad_FW.to(taps_FW.dtype), None


def _summed(x_BSF: Tensor, taps_FW: Tensor, number_BS: Tensor | None) -> Tensor:
    """Return the weighted sums in fp32."""
    out_BSF = torch.zeros_like(x_BSF, dtype=torch.float32)
    for back, before_BSF in _before(x_BSF, taps_FW.shape[1], number_BS):
        out_BSF[:, back:] += before_BSF * taps_FW[:, -1 - back].float()
    return out_BSF


def _before(x_BSF: Tensor, width: int, number_BS: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Yield how far back each tap looks, and what it sees from the first token on that has so many
    before it.
    """
    for back in range(min(width, x_BSF.shape[1])):
        yield back, _of_same(x_BSF[:, : x_BSF.shape[1] - back], back, number_BS)


def _of_same(x_BSF: Tensor, back: int, number_BS: Tensor | None) -> Tensor:
    """Return zeros for tokens whose document has ended `back` tokens later."""
    ended_BS1 = _ended(back, number_BS)
    return x_BSF if ended_BS1 is None else x_BSF.masked_fill(ended_BS1, 0)


def _ended(back: int, number_BS: Tensor | None) -> Tensor | None:
    """Return whether each token's document has ended `back` tokens later; None: no document has."""
    if number_BS is None or not back:
        return None
    return (number_BS[:, back:] != number_BS[:, :-back])[..., None]


def document_numbers(offsets: Tensor, batch: int, tokens: int) -> Tensor:
    """Return the number of the document of each token, B × S, from `DocumentOffsets.queries`."""
    each = torch.arange(batch * tokens, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:], each, right=True).view(batch, tokens)


def forgetting(g_BSH: Tensor, number_BS: Tensor) -> Tensor:
    """Return the logarithms of decay with the state forgotten where a document begins."""
    begins_BS = F.pad(number_BS[:, 1:] != number_BS[:, :-1], (1, 0))
    return torch.where(begins_BS[..., None], FORGETS, g_BSH)
