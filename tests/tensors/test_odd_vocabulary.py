"""Logits of vocabularies that are no multiple of 16 bytes: padded rows, and the values of
unpadded ones.

Shapes: B sequences, S tokens per sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from app.choices import Dtype
from app.config import LossConfig, ModelConfig
from app.model.layers.frozen import FrozenLinear
from app.model.layers.linear import TorchLinear
from app.model.layers.logits import logits_of
from app.model.layers.loss import PLAIN, PlainLogits, summed_loss, token_losses
from app.model.layers.weight_grads import WeightGradQueue
from tests.rounding import expect_sums, numbered
from tests.tensors.activation_memory import (
    DENSE,
    TORCH,
    batch_of,
    chunk_of,
    forward_and_backward,
    planned,
    run_of,
    with_kernels,
)

B, S, D = 2, 37, 24
ODD = (131, 1002, 65)
MAPS = {
    "plain": ModelConfig(),
    "scaled": ModelConfig(logit_scale=0.25),
    "capped": ModelConfig(logit_scale=2.0, logit_softcap=30.0),
}


def terms(vocab: int, dtype: torch.dtype) -> int:
    """Bound of `expect_sums`: in bf16, logits are rounded, and results last."""
    return 2 if dtype == torch.bfloat16 else max(vocab, B * S, D)


def losses(
    logits: PlainLogits, vocab: int, dtype: torch.dtype, chunk: int | None, deferred: bool
) -> tuple[dict[str, Tensor], int]:
    """Sum, loss of every label and both gradients; and the stride of logits."""
    generator = torch.Generator().manual_seed(vocab)
    h, weight = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((B, S, D), (vocab, D))
    )
    labels = torch.randint(-9, vocab, (B, S), generator=generator)
    labels[0, 0] = vocab - 1
    weight, backend, queue = nn.Parameter(weight), TorchLinear(), WeightGradQueue()
    total, each = summed_loss(
        h.requires_grad_(),
        weight,
        labels,
        backend=backend,
        chunk_tokens=chunk,
        logits=logits,
        sink=queue if deferred else None,
    )
    (total * 0.25).backward()
    gradient = torch.zeros(vocab, D)
    queue.run(lambda _, made: made.add_to(gradient))
    of_loss = logits.backend(backend)
    scored = token_losses(h.detach(), weight, labels, of_loss)
    found = {
        "total": total.detach(),
        "each": each,
        "h": h.grad,
        "weight": gradient if deferred else weight.grad,
        "scored": scored,
    }
    with torch.no_grad():
        return found, of_loss.output(h.flatten(0, 1), weight).stride(0)


@pytest.mark.parametrize("deferred", [False, True], ids=["autograd", "deferred"])
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("model", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", ODD)
def test_padded_logits_have_the_same_values(
    vocab: int, dtype: torch.dtype, model: ModelConfig, chunk: int | None, deferred: bool
):
    found, stride = losses(logits_of(model, vocab), vocab, dtype, chunk, deferred)
    wanted, plain = losses(logits_of(model, 8), vocab, dtype, chunk, deferred)
    assert plain == vocab and stride == -(-vocab // 64) * 64
    expect_sums(found, wanted, terms(vocab, dtype), dtype=dtype)
    assert found["weight"].any()


@pytest.mark.parametrize("chunk", [None, 5])
def test_padded_logits_of_a_frozen_head(chunk: int | None):
    generator = torch.Generator().manual_seed(0)
    h, table = (torch.randn(*shape, generator=generator) for shape in ((B, S, D), (131, D)))
    labels = torch.randint(131, (B, S), generator=generator)
    found = []
    for frozen in (True, False):
        weight, leaf = nn.Parameter(table, requires_grad=not frozen), h.clone().requires_grad_()
        total, _ = summed_loss(
            leaf,
            weight,
            labels,
            backend=FrozenLinear() if frozen else TorchLinear(),
            chunk_tokens=chunk,
            logits=logits_of(MAPS["plain"], 131),
        )
        total.backward()
        assert (weight.grad is None) == frozen
        found.append((total, leaf.grad))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("rows", [8, 264, 50304, 32008])
def test_multiples_are_not_padded(rows: int):
    assert logits_of(ModelConfig(), rows) is PLAIN
    assert logits_of(MAPS["capped"], rows) == logits_of(MAPS["capped"], 16)


@pytest.mark.parametrize("dtype", TORCH, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_step_of_a_model_with_odd_vocabulary(tied: bool, dtype: Dtype):
    run = run_of(dataclasses.replace(DENSE, vocab_size=1003, tie_embeddings=tied), dtype)
    torch.manual_seed(0)
    chunk, batch = chunk_of(run), batch_of(run)
    found = []
    for logits in (chunk.logit_map, PLAIN):
        chunk.logit_map = logits
        context = chunk.context(batch.positions, batch.ends)
        out = chunk(batch.tokens, context).x
        loss = chunk.loss(out, batch.labels, context)
        scored = chunk.losses(out, batch.labels)
        found.append(numbered((loss, scored, *torch.autograd.grad(loss, [*chunk.parameters()]))))
    expect_sums(*found, terms(1003, TORCH[dtype]), dtype=TORCH[dtype])


kernels = pytest.fixture(with_kernels)


@pytest.mark.parametrize("chunk_tokens", [None, 128])
def test_plan_counts_the_padding(chunk_tokens: int | None, kernels: None):
    """Planned and measured bytes grow by the padding of 256 tokens: of what is kept, or of the two
    chunks that are alive at forward's peak.
    """
    pytest.importorskip("triton")
    bytes_of = []
    for vocab in (72, 65):  # 72 is not padded, 65 to 128
        run = run_of(dataclasses.replace(DENSE, vocab_size=vocab, num_layers=1), Dtype.bfloat16)
        run = dataclasses.replace(run, loss=LossConfig(chunk_tokens=chunk_tokens))
        memory, chunk = planned(run), chunk_of(run)
        chunk.chunk_tokens = chunk_tokens
        forward, kept, _ = forward_and_backward(run, chunk, True)
        bytes_of.append(
            (memory.total, kept) if chunk_tokens is None else (memory.forward, forward - kept)
        )
    plain, odd = bytes_of
    expected, found = (b - a for a, b in zip(plain, odd, strict=True))
    assert expected == 256 * (128 - 72) * 2
    assert 0 <= found - expected <= 64 * 128 * 2  # a copy of the last rows of the weight
