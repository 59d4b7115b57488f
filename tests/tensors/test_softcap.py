"""Attention with capped scores, beside its formula with all scores at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.model.attention.softcap import SoftcapAttention
from app.model.layers.attend import DocumentOffsets, visible
from app.plan.parts import attention as planned
from tests.rounding import expect_alike, plain_and_exact

CAP, SCALE = 1.5, 0.4
ENDS = torch.tensor([[3, 9, 12], [12, 12, 12]], dtype=torch.int32)
CASES = {
    "whole": (12, None, False),
    "window": (12, 4, False),
    "last queries": (5, None, False),
    "last queries, window": (5, 4, False),
    "documents": (12, None, True),
    "documents, window, last queries": (7, 4, True),
}


def formula(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    queries = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(queries, dim=2) for x in (k, v))
    scores = CAP * torch.tanh(torch.einsum("bsnh,bknh->bnsk", q, k) * SCALE / CAP)
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bnsk,bknh->bsnh", probs, v)


@pytest.mark.parametrize("case", CASES)
def test_softcap_is_its_formula(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planned, "MOST_QUERIES", 5)  # blocks of queries, the last one shorter
    queries, window, several = CASES[case]
    documents = DocumentOffsets.of(ENDS, queries, 12) if several else None
    random = torch.Generator().manual_seed(0)
    shapes = (2, queries, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8), (2, queries, 4, 8)
    q, k, v, grad = (torch.randn(shape, generator=random) * 2 for shape in shapes)
    hidden = ~visible(2, queries, 12, q.device, window, documents)

    def plain(*given: Tensor) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in given[:3]]
        out = formula(*leaves, hidden)
        return [out, *torch.autograd.grad(out, leaves, given[3])]

    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    out = SoftcapAttention(CAP)(*leaves, window=window, documents=documents, scale=SCALE)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    theirs = plain_and_exact(plain, q, k, v, grad)
    expect_alike({str(n): each.detach() for n, each in enumerate(found)}, *theirs)
