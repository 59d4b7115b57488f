"""The head of a vocabulary that is no multiple of 16 bytes, on a GPU: right, and by fast GEMMs.

Shapes: B sequences, S tokens per sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from app.config import ModelConfig
from app.model.layers.linear import TorchLinear
from app.model.layers.logits import logits_of
from app.model.layers.loss import summed_loss, token_losses
from app.model.layers.weight_grads import MainGradSink
from tests.rounding import expect_sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
B, S, D = 2, 1024, 512
SLOW = re.compile(r"align[12](?!\d)")  # GEMMs that load one or two elements at a time


def exact(h: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Losses and gradients in fp64."""
    h, weight = (value.detach().double().requires_grad_() for value in (h, weight))
    each = F.cross_entropy((h @ weight.T).flatten(0, 1), labels.flatten(), reduction="none")
    h_grad, weight_grad = torch.autograd.grad(each.sum(), (h, weight))
    return {"each": each.detach().view_as(labels), "h": h_grad, "weight": weight_grad}


@pytest.mark.parametrize("fused", [False, True], ids=["autograd", "main gradient"])
@pytest.mark.parametrize("chunk", [None, 512])
@pytest.mark.parametrize("vocab", [100_278, 49_155])
def test_odd_vocabulary_takes_fast_gemms(vocab: int, chunk: int | None, fused: bool):
    generator = torch.Generator("cuda").manual_seed(0)
    h, table = (
        torch.randn(*shape, generator=generator, device="cuda").div(scale).bfloat16()
        for shape, scale in (((B, S, D), 1), ((vocab, D), 20))
    )
    labels = torch.randint(-vocab // 8, vocab, (B, S), generator=generator, device="cuda")
    labels[labels < 0] = -100
    labels[0, 0] = vocab - 1
    h.requires_grad_()
    weight, main = nn.Parameter(table), torch.zeros(vocab, D, device="cuda")
    sink = MainGradSink(lambda _, gradient: gradient.add_to(main)) if fused else None
    backend, logits = TorchLinear(), logits_of(ModelConfig(), vocab)

    def step() -> tuple[Tensor, Tensor]:
        total, each = summed_loss(
            h, weight, labels, backend=backend, chunk_tokens=chunk, sink=sink, logits=logits
        )
        total.backward()
        return each, token_losses(h, weight, labels, logits.backend(backend))

    step()  # kernels are compiled
    h.grad = weight.grad = None
    main.zero_()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        each, scored = step()
        torch.cuda.synchronize()
    found = {"each": each, "h": h.grad, "weight": main if fused else weight.grad}
    wanted = exact(h, weight, labels)
    expect_sums(found, wanted, terms=2, dtype=torch.bfloat16)
    expect_sums({"scored": scored}, {"scored": wanted["each"]}, terms=2, dtype=torch.bfloat16)
    kernels = {e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA}
    assert kernels and not [*filter(SLOW.search, kernels)], sorted(kernels)
