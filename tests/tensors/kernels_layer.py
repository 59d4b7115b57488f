"""Shared by test_kernels_layer.py and other tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from app.config.attention import Rope
from app.kernels.attention.heads import HeadNorms, split_and_rotate
from app.kernels.rms_norm import rms_norm, rms_norm_beside
from app.kernels.short_convolution import short_convolution
from app.kernels.swiglu import geglu, swiglu
from app.model.layers.layers import RotaryTable, rotate, rotate_part

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# of 8 bits, to the nearest; Triton's interpreter cuts the others off
BF16_ROUNDING = 2**-8 if DEVICE == "cuda" else 2**-7


EPS = 1e-5


Outputs = tuple[Tensor, ...]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, exact: Tensor) -> None:
    """To 1e-6 of the largest value, and in bf16 one rounding besides."""
    rounding = BF16_ROUNDING if found.dtype is torch.bfloat16 else 0.0
    bound = exact.abs() * rounding + 1e-6 * (exact.abs().amax() if exact.numel() else 1.0)
    assert found.shape == exact.shape
    assert bool(((found.double() - exact).abs() <= bound).all())


def results(function: Callable[..., Outputs], inputs: Outputs, grads: Outputs) -> Outputs:
    """Outputs, and gradients of the inputs."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    outs = function(*leaves)
    torch.autograd.backward(outs, grads)
    return (
        *(out.detach() for out in outs),
        *(leaf.grad for leaf in leaves if leaf.grad is not None),
    )


def check(
    kernel: Callable[..., Outputs],
    plain: Callable[..., Outputs],
    inputs: Outputs,
    strided: bool = False,
) -> None:
    """The kernel as the plain version in fp64, in any order of the gradients' memory, and twice
    the same.
    """
    with torch.no_grad():
        outs = kernel(*inputs)
    assert all(out.is_contiguous() and out.dtype is inputs[0].dtype for out in outs)
    grads = tuple(
        normal(*out.shape, dtype=out.dtype, seed=number + 5) for number, out in enumerate(outs)
    )
    if strided:
        grads = tuple(grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads)
    found, again = results(kernel, inputs, grads), results(kernel, inputs, grads)
    exact = results(
        plain, tuple(tensor.double() for tensor in inputs), tuple(grad.double() for grad in grads)
    )
    for one, other, right in zip(found, again, exact, strict=True):
        assert torch.equal(one, other)
        close(one, right)


def plain_swiglu(both: Tensor) -> Outputs:
    gate, up = both.chunk(2, dim=-1)
    return (F.silu(gate) * up,)


def check_swiglu(*shape: int, dtype: torch.dtype) -> None:
    check(lambda both: (swiglu(both),), plain_swiglu, (normal(*shape, dtype=dtype),))


def plain_geglu(both: Tensor) -> Outputs:
    gate, up = both.chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up,)


def check_geglu(*shape: int, dtype: torch.dtype) -> None:
    check(lambda both: (geglu(both),), plain_geglu, (normal(*shape, dtype=dtype),))


def head_cases(
    batch: int,
    length: int,
    groups: int,
    queries: int,
    width: int,
    dtype: torch.dtype,
    tables: int,
    norms: bool,
    rotated: int | None = None,
) -> tuple[Callable[..., Outputs], Callable[..., Outputs], Outputs]:
    """The kernel, the plain version and arguments for both; `rotated`: values of a head that are,
    None: all.
    """
    positions = torch.randint(
        0, 4096, (tables, length), generator=torch.Generator().manual_seed(3)
    ).to(DEVICE)
    table = RotaryTable.of(positions, Rope(rotated or width, 10000.0))
    turn = rotate if rotated is None else rotate_part

    def kernel(qkv: Tensor, *weights: Tensor) -> Outputs:
        given = HeadNorms(*weights, EPS) if norms else None
        return split_and_rotate(
            qkv,
            table.cos_BS1H,
            table.sin_BS1H,
            num_kv_heads=groups,
            queries_per_kv=queries,
            norms=given,
        )

    def plain(qkv: Tensor, *weights: Tensor) -> Outputs:
        q, k, v = qkv.unflatten(-1, (groups, queries + 2, width)).split((queries, 1, 1), dim=3)
        pair = (q.flatten(2, 3), k.squeeze(3))
        if norms:
            pair = tuple(
                F.rms_norm(x, (width,), weight, EPS)
                for x, weight in zip(pair, weights, strict=True)
            )
        return (*(turn(x, table) for x in pair), v.squeeze(3))

    qkv = normal(batch, length, groups * (queries + 2) * width, dtype=dtype)
    return (
        kernel,
        plain,
        (qkv, *(normal(width, dtype=dtype, seed=seed) for seed in (1, 2) if norms)),
    )


def check_rms_norm(*shape: int, dtype: torch.dtype) -> None:
    width = shape[-1]
    inputs = normal(*shape, dtype=dtype), normal(width, dtype=dtype, seed=1)
    check(
        lambda x, w: (rms_norm(x, w, EPS),), lambda x, w: (F.rms_norm(x, (width,), w, EPS),), inputs
    )


def check_rms_norm_beside(*shape: int, dtype: torch.dtype) -> None:
    """Both gradients together are rounded once; forward is that of the norm alone, to the bit."""
    width = shape[-1]
    x, weight = normal(*shape, dtype=dtype), normal(width, dtype=dtype, seed=1)

    def plain(x: Tensor, weight: Tensor) -> Outputs:
        return x, F.rms_norm(x, (width,), weight, EPS)

    check(lambda x, weight: rms_norm_beside(x, weight, EPS), plain, (x, weight))
    same, out = rms_norm_beside(x, weight, EPS)
    assert torch.equal(same, x) and same.data_ptr() == x.data_ptr()
    assert torch.equal(out, rms_norm(x, weight, EPS))


def check_convolution(
    tokens: int, channels: int, width: int, *, dtype: torch.dtype, documents: bool
) -> None:
    """Also where documents end within a program's tokens, and end its tokens."""
    ends = torch.tensor([1, 64, 66], device=DEVICE)
    number = torch.searchsorted(ends, torch.arange(tokens, device=DEVICE), right=True)
    number = number.expand(2, -1) if documents else None

    def kernel(x: Tensor, taps: Tensor) -> Outputs:
        return (short_convolution(x, taps, number),)

    def plain(x: Tensor, taps: Tensor) -> Outputs:
        total = torch.zeros_like(x)
        for back in range(min(width, tokens)):
            seen = F.pad(x[:, : tokens - back], (0, 0, back, 0))
            if number is not None:
                came = F.pad(number[:, : tokens - back], (back, 0), value=-1)
                seen = seen * (came == number)[..., None]
            total = total + seen * taps[:, width - 1 - back]
        return (F.silu(total),)

    taps = normal(channels, width, dtype=dtype, seed=1)
    check(kernel, plain, (normal(2, tokens, channels, dtype=dtype), taps))
