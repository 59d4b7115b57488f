"""The loss straight from hidden states against torch's cross-entropy of the logits.

Shapes: B sequences, S tokens per sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import app.model.layers.loss
from app.model.layers.linear import TorchLinear
from app.model.layers.loss import summed_loss
from app.model.layers.weight_grads import WeightGradQueue
from tests.oracle import oracle
from tests.rounding import expect_sums

B, S, D, V = 2, 9, 8, 23
BACKEND = TorchLinear()
TERMS = max(D, V, B * S)  # of the longest sum
GOLDEN = oracle("numerics")["cross_entropy"]


PLAIN = [case for case in GOLDEN if not case["label_smoothing"]]


def draw(dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h, weight = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((B, S, D), (V, D))
    )
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) < 0.3] = -100
    return h.requires_grad_(), nn.Parameter(weight), labels


def exact(h: Tensor, weight: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in fp64."""
    h, weight = (value.detach().double().requires_grad_() for value in (h, weight))
    loss = F.cross_entropy((h @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    return loss.detach(), *(scale * grad for grad in torch.autograd.grad(loss, (h, weight)))


@pytest.mark.parametrize("rows", [1024, 4], ids=["all rows at once", "blocks of 4 rows"])
@pytest.mark.parametrize("chunk", [None, 1, 5, 18, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients(
    dtype: torch.dtype, chunk: int | None, rows: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(app.model.layers.loss, "ROWS", rows)
    h, weight, labels = draw(dtype)
    loss, parts = summed_loss(h, weight, labels, backend=BACKEND, chunk_tokens=chunk)
    assert not parts.requires_grad and parts.shape == labels.shape
    assert torch.equal(parts.sum(), loss) and parts[labels == -100].eq(0).all()
    (loss * 0.25).backward()
    wanted, h_grad, weight_grad = exact(h, weight, labels, scale=0.25)
    terms = (
        TERMS if dtype == torch.float32 else 2
    )  # in bf16 the logits are rounded, and the results last
    found = {"loss": loss, "h": h.grad, "weight": weight.grad}
    expect_sums(found, {"loss": wanted, "h": h_grad, "weight": weight_grad}, terms, dtype=dtype)
    assert h.grad[labels == -100].eq(0).all() and h.grad[labels != -100].ne(0).any()


@pytest.mark.parametrize("chunk", [None, 5])
def test_the_weight_gradient_can_wait(chunk: int | None):
    h, weight, labels = draw(torch.float32)
    queue, sums = WeightGradQueue(), torch.zeros(V, D)
    loss, _ = summed_loss(h, weight, labels, backend=BACKEND, chunk_tokens=chunk, sink=queue)
    loss.backward()
    assert weight.grad is None
    queue.run(lambda param, gradient: gradient.add_to(sums))
    expect_sums({"weight": sums}, {"weight": exact(h, weight, labels, scale=1.0)[2]}, TERMS)


def test_nothing_with_a_label_is_nothing():
    h, weight, labels = draw(torch.float32)
    loss, _ = summed_loss(h, weight, torch.full_like(labels, -100), backend=BACKEND)
    loss.backward()
    assert loss == 0 and h.grad.eq(0).all() and weight.grad.eq(0).all()


def test_large_logits_stay_finite():
    h, weight, labels = draw(torch.float32)
    loss, _ = summed_loss(h * 1e4, weight, labels, backend=BACKEND)
    loss.backward()
    assert loss.isfinite() and h.grad.isfinite().all()


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: str(len(case["logits"])))
def test_equals_golden(case: dict):
    logits, target, upstream = (torch.tensor(case[key]) for key in ("logits", "target", "upstream"))
    for s in range(len(target)):
        for b in range(target.shape[1]):
            h = logits[s : s + 1, b : b + 1].clone().requires_grad_()
            loss, _ = summed_loss(
                h,
                nn.Parameter(torch.eye(logits.shape[2])),
                target[s : s + 1, b : b + 1],
                backend=BACKEND,
            )
            (loss * upstream[s, b]).backward()
            golden = {"loss": case["loss"][s][b], "logits": case["grad_logits"][s][b]}
            expect_sums({"loss": loss, "logits": h.grad[0, 0]}, golden, terms=2 * logits.shape[2])
