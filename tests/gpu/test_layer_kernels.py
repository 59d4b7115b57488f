"""Kernels of a layer at the sizes of real models on a GPU: right, the same when repeated, and in
CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from app.kernels.rms_norm import rms_norm
from app.kernels.swiglu import swiglu
from tests.tensors.kernels_layer import (
    EPS,
    Outputs,
    check,
    check_geglu,
    check_rms_norm,
    check_rms_norm_beside,
    check_swiglu,
    head_cases,
    normal,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
T = 8192
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(T, 2816), (49152, 512), (T, 11008)])
def test_swiglu(rows: int, width: int, dtype: torch.dtype):
    check_swiglu(rows, 2 * width, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_geglu(dtype: torch.dtype):
    check_geglu(T, 2 * 14336, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "tables"),
    [(16, 16, 64, 1), (16, 4, 64, 2), (32, 8, 128, 1), (32, 4, 128, 2), (8, 1, 80, 1)],
)
def test_heads(heads: int, groups: int, width: int, tables: int, dtype: torch.dtype, norms: bool):
    check(
        *head_cases(
            2,
            T // 2,
            groups,
            queries=heads // groups,
            width=width,
            dtype=dtype,
            tables=tables,
            norms=norms,
        ),
        strided=True,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1024, 2048, 2560, 4096, 8192])
def test_rms_norm(width: int, dtype: torch.dtype):
    check_rms_norm(T, width, dtype=dtype)
    check_rms_norm_beside(T, width, dtype=dtype)


def test_values_past_32_bit_offsets():
    """The last rows of a tensor of more than 2³¹ values."""
    width = 4096
    both = torch.zeros(2**31 // (2 * width) + 8, 2 * width, device="cuda", dtype=torch.bfloat16)
    both[-8:] = normal(8, 2 * width, dtype=torch.bfloat16)
    assert torch.equal(swiglu(both)[-8:], swiglu(both[-8:].clone()))
    weight = normal(2 * width, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(both, weight, EPS)[-8:], rms_norm(both[-8:].clone(), weight, EPS))


def captured(function: Callable[..., Outputs], inputs: Outputs) -> tuple[Outputs, Outputs]:
    """Outputs and gradients as they come, and from a graph of the same."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]

    def run() -> Outputs:
        outs = function(*leaves)
        return (
            *(out.detach() for out in outs),
            *torch.autograd.grad(outs, leaves, [torch.ones_like(out) for out in outs]),
        )

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = run()
        with torch.cuda.graph(graph, stream=stream):
            replayed = run()
        for value in replayed:
            value.zero_()
        graph.replay()
    torch.cuda.synchronize()
    return eager, replayed


def norm(x: Tensor, weight: Tensor) -> Outputs:
    return (rms_norm(x, weight, EPS),)


@pytest.mark.parametrize("name", ["swiglu", "heads", "rms_norm"])
def test_in_a_graph(name: str):
    kernel, _, inputs = {
        "swiglu": (lambda both: (swiglu(both),), None, (normal(T, 2048, dtype=torch.bfloat16),)),
        "heads": head_cases(
            2, 1024, 4, queries=4, width=64, dtype=torch.bfloat16, tables=1, norms=True
        ),
        "rms_norm": (
            norm,
            None,
            (normal(T, 1024, dtype=torch.bfloat16), normal(1024, dtype=torch.bfloat16, seed=1)),
        ),
    }[name]
    assert all(map(torch.equal, *captured(kernel, inputs)))
