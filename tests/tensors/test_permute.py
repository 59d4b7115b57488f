"""Permutation of token rows to experts and back: golden values, gradients by autograd on
indexing, exact repetition.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from app.moe.permute import combine, permute, reorder, sort_by_expert
from tests.oracle import oracle
from tests.rounding import expect_sums, numbered

CASES = oracle("router")["permute"]
FIXED_K = [
    case
    for case in CASES
    if len({len(chosen) for chosen in case["routing"]}) == 1 and case["routing"][0]
]


@pytest.mark.parametrize("case", FIXED_K)
def test_permute_and_combine_equal_golden(case: dict[str, Any]):
    experts, tokens = torch.tensor(case["routing"]), torch.tensor(case["tokens"])
    record = sort_by_expert(experts, case["num_experts"])
    rows, probs = permute(tokens, record), torch.tensor(case["probs"]).gather(1, experts)
    assert record.token_of_row_R.tolist() == case["sorted_indices"]
    assert rows.tolist() == case["permuted"]
    flat = torch.empty(probs.numel()).index_copy(0, record.row_of_TK.flatten(), probs.flatten())
    assert flat.tolist() == torch.tensor(case["permuted_probs"]).tolist()
    found, golden = combine(rows, probs, record), torch.tensor(case["unpermute_with_probs"])
    expect_sums({"out": found}, {"out": golden}, terms=2 * experts.shape[1])
    assert combine(rows, torch.ones_like(probs), record).tolist() == case["unpermute_no_probs"]


def draw(top_k: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """33 tokens of width 6, their probabilities, and their choice among 8 experts, of which
    expert 5 gets no token.
    """
    torch.manual_seed(1)
    weights = torch.ones(33, 8)
    weights[:, 5] = 0
    experts = weights.multinomial(top_k).sort(dim=1).values
    x, probs = torch.randn(33, 6, dtype=dtype), torch.rand(33, top_k)
    return x.requires_grad_(), probs.requires_grad_(), experts


def test_rows_are_expert_major_with_tokens_ascending():
    _, _, experts = draw()
    record = sort_by_expert(experts, 8)
    wanted = [(e, t) for e in range(8) for t in range(len(experts)) if e in experts[t]]
    assert record.token_of_row_R.tolist() == [t for _, t in wanted]
    assert record.row_of_TK.tolist() == [
        [wanted.index((e, t)) for e in chosen] for t, chosen in enumerate(experts.tolist())
    ]
    assert record.ends_E.dtype == torch.int32
    assert record.ends_E.tolist() == experts.flatten().bincount(minlength=8).cumsum(0).tolist()


def test_an_unordered_choice_is_sorted_too():
    record = sort_by_expert(torch.tensor([[3, 0], [0, 3]]), 4)
    assert record.row_of_TK.tolist() == [[2, 0], [1, 3]] and record.ends_E.tolist() == [2, 2, 2, 4]


def test_gradients_equal_indexing():
    x, probs, experts = draw(dtype=torch.float64)
    record = sort_by_expert(experts, 8)
    weight = torch.randn(len(experts) * 3, 6, dtype=torch.float64)
    out = combine(permute(x, record) * weight, probs, record)
    grad = torch.randn_like(out)
    fast = torch.autograd.grad(out, (x, probs), grad)
    rows = x[record.token_of_row_R] * weight
    plain = (rows[record.row_of_TK] * probs[:, :, None]).sum(1)
    slow = torch.autograd.grad(plain, (x, probs), grad)
    expect_sums(
        numbered((out, fast[0])), numbered((plain, slow[0])), terms=2 * 3, dtype=torch.float64
    )
    expect_sums({"probs": fast[1]}, {"probs": slow[1]}, terms=2 * 6)  # which are fp32


def test_expanded_gradients_and_single_choices_work():
    x, probs, experts = draw(top_k=1)
    record = sort_by_expert(experts, 8)
    combine(permute(x, record), probs, record).sum().backward()
    assert torch.equal(x.grad, probs.detach().expand_as(x))
    expect_sums({"probs": probs.grad[:, 0]}, {"probs": x.detach().double().sum(1)}, terms=6)


def test_bfloat16_sums_are_rounded_once():
    x, probs, experts = draw(dtype=torch.bfloat16)
    record = sort_by_expert(experts, 8)
    rows = permute(x, record)
    rows.retain_grad()
    out = combine(rows, probs, record)
    grad = torch.randn(out.shape).bfloat16()
    out.backward(grad)
    wide = rows.detach().float()[record.row_of_TK]
    exact = sum(wide[:, k] * probs[:, k, None] for k in range(3))
    assert out.dtype == x.grad.dtype == torch.bfloat16 and probs.grad.dtype == torch.float32
    assert torch.equal(out, exact.bfloat16())
    expect_sums(
        {"probs": probs.grad}, {"probs": (wide.double() * grad.double()[:, None]).sum(-1)}, terms=6
    )
    per_row = (grad.float()[:, None] * probs.detach()[:, :, None]).bfloat16()
    assert torch.equal(rows.grad[record.row_of_TK], per_row)
    assert torch.equal(x.grad, sum(per_row[:, k].float() for k in range(3)).bfloat16())


def test_reorder_is_undone_by_its_inverse():
    rows = torch.randn(11, 4, requires_grad=True)
    index = torch.randperm(11)
    inverse = index.argsort()
    there = reorder(rows, index, inverse)
    assert torch.equal(there, rows[index]) and torch.equal(reorder(there, inverse, index), rows)
    grad = torch.randn(11, 4)
    assert torch.equal(torch.autograd.grad(there, rows, grad)[0], grad[inverse])


def test_no_tokens_give_no_rows():
    record = sort_by_expert(torch.zeros(0, 2, dtype=torch.int64), 4)
    x, probs = torch.zeros(0, 6, requires_grad=True), torch.zeros(0, 2, requires_grad=True)
    out = combine(permute(x, record), probs, record)
    out.sum().backward()
    assert (
        out.shape == x.grad.shape == (0, 6)
        and probs.grad.shape == (0, 2)
        and record.ends_E.tolist() == [0, 0, 0, 0]
    )
