"""Attention sinks and the clamped gate on a GPU, beside fp64.

Shapes: as in `app.model.attention.sinks`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.choices import AttentionBackendKind
from app.kernels.clamped_swiglu import clamped_swiglu
from app.model.attention.sinks import TorchSinks, with_sinks
from app.model.layers.attend import DocumentOffsets
from tests.gpu.programs import GPUS
from tests.gpu.test_document_kernels import ENDS, attend_of, drawn, each_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]
HEADS = 8


def results(
    backend: AttentionBackendKind | None,
    heads: list[Tensor],
    sinks_N: Tensor,
    *,
    window: int | None,
    documents: DocumentOffsets | None,
    ordered: bool = False,
) -> list[Tensor]:
    """Output, gradients of queries, keys, values and sinks; backend None: by GEMMs in fp64."""
    dtype = torch.float64 if backend is None else torch.bfloat16
    *given, grad = (each.to(dtype) for each in heads)
    leaves = [each.detach().clone().requires_grad_() for each in (*given, sinks_N.to(dtype))]
    *inputs, sinks = leaves
    attend = TorchSinks(sinks, True)
    if backend is not None:
        attend = with_sinks(attend_of(backend, ordered), sinks)
    out = attend(*inputs, window=window, documents=documents, scale=None)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@each_backend
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("window", [None, 50])
def test_kernels_with_sinks_equal_fp64(
    backend: AttentionBackendKind, packed: bool, window: int | None
):
    heads, documents = drawn(320, 320)
    generator = torch.Generator("cuda").manual_seed(1)
    sinks_N = torch.randn(HEADS, generator=generator, device="cuda").bfloat16()
    choices = {"window": window, "documents": documents if packed else None}
    try:
        found = results(backend, heads, sinks_N, **choices)
    except RuntimeError as error:
        # of documents alone; a run is refused before it starts
        assert packed and "Known cuDNN < 9.26.0 issue" in str(error)
        pytest.skip(str(error).splitlines()[0])
    wanted = results(None, heads, sinks_N, **choices)
    for each, exact in zip(found, wanted, strict=True):
        assert (each.double() - exact).norm() < 1e-2 * exact.norm()
    # a sink of −∞ is none at all, and these are not
    none = results(None, heads, torch.full_like(sinks_N, -1e9), **choices)
    assert (none[0] - wanted[0]).norm() > 0.1 * wanted[0].norm()
    assert not packed or len(ENDS) == len(heads[0])


def test_ordered_sinks_repeat():
    heads, documents = drawn(320, 320)
    sinks_N = torch.linspace(-1, 2, HEADS, device="cuda")
    first, *others = (
        results(
            AttentionBackendKind.torch,
            heads,
            sinks_N,
            window=50,
            documents=documents,
            ordered=True,
        )
        for _ in range(10)
    )
    assert all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.parametrize("used", [0, 1, 333, 512])
def test_clamped_gate_equals_fp64(used: int):
    generator = torch.Generator("cuda").manual_seed(0)
    both = 5 * torch.randn(512, 2 * 192, generator=generator, device="cuda").bfloat16()
    grad = torch.randn(512, 192, generator=generator, device="cuda").bfloat16()
    rows = torch.tensor([used], dtype=torch.int32, device="cuda")

    leaf = both.clone().requires_grad_()
    act = clamped_swiglu(leaf, rows, limit=7.0, alpha=1.702)
    (back,) = torch.autograd.grad(act, leaf, grad)

    exact_leaf = both.double().requires_grad_()
    gate, up = exact_leaf.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    exact = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    (exact_back,) = torch.autograd.grad(exact, exact_leaf, grad.double())
    for found, wanted in ((act, exact), (back, exact_back)):
        error = (found[:used].double() - wanted[:used]).norm()
        assert error <= 2**-8 * wanted[:used].norm()
