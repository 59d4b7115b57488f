"""The mixture-of-experts part of a layer on a GPU: a shared expert on a stream of its own, and
capacity without waiting.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from app.choices import DropPolicy
from app.config import ModelConfig, MoEConfig
from app.config.attention import Rope
from app.model.layers.layer_groups import LayerGroups
from app.model.layers.layers import layer_context
from app.model.layers.weight_grads import WeightGradQueue
from app.moe.dispatch.local import LocalDispatcher
from app.moe.phases import MoEBody

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
D, STEPS = 512, 20
MODEL = ModelConfig(num_layers=1, hidden_size=D, num_heads=4, num_kv_heads=2, ffn_hidden_size=D)
MOE = MoEConfig(
    num_experts=16,
    top_k=4,
    ffn_hidden_size=256,
    shared_ffn_hidden_size=1024,
    shared_gate=True,
    z_loss_coeff=0.01,
)
Results = tuple[list[Tensor], dict[str, Tensor]]


def body_of(moe: MoEConfig) -> MoEBody:
    side = torch.cuda.Stream() if moe.shared_overlap else None
    body = MoEBody(
        MODEL, moe, LocalDispatcher(moe.num_experts), layer_groups=LayerGroups(), side=side
    )
    random = torch.Generator().manual_seed(0)
    for param in body.parameters():
        torch.nn.init.normal_(param, std=0.05, generator=random)
    body.to("cuda")
    for name, param in body.named_parameters():
        param.data = param.data.bfloat16()
        # as the gradient buffers do, on the stream of the run
        param.register_post_accumulate_grad_hook(lambda param: None)
        assert param.is_cuda, name
    return body


def forward(body: MoEBody, x: Tensor, later: WeightGradQueue | None = None) -> Tensor:
    context = layer_context(torch.zeros(1, 1, device="cuda"), None, [Rope(4, 10.0)], sink=later)
    values: dict[str, Any] = {"x": x, "context": context}
    for index, phase in enumerate(body.phases):
        values.update(
            zip(phase.outputs, phase.run(*(values[name] for name in phase.inputs)), strict=True)
        )
        needed = {name for after in body.phases[index + 1 :] for name in after.inputs} | {
            "x",
            "routing",
        }
        # memory is free for others at once
        values = {name: value for name, value in values.items() if name in needed}
    return values["x"] + values["routing"].loss


def train(body: MoEBody, split: bool = False, sync: str = "default") -> Results:
    """Outputs of some steps, with two layers' worth of memory in use and given back, and the
    summed gradients.
    """
    inputs = [
        torch.randn(2, 1024, D, generator=torch.Generator().manual_seed(step)).cuda().bfloat16()
        for step in range(STEPS)
    ]
    outputs = []
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns that it is a prototype
        torch.cuda.set_sync_debug_mode(sync)
    try:
        for x in inputs:
            later = WeightGradQueue() if split else None
            out = forward(body, forward(body, x.requires_grad_(), later), later)
            out.square().mean().backward()
            if later is not None:
                later.run(
                    lambda param, given: setattr(
                        param, "grad", given() if param.grad is None else param.grad + given()
                    )
                )
            outputs += [out.detach(), x.grad]
            del out
            with torch.no_grad():
                forward(body, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return outputs, {name: param.grad for name, param in body.named_parameters()}


def expect_equal(found: Results, expected: Results) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    for name, grad in expected[1].items():
        assert torch.equal(found[1][name], grad), name


@pytest.mark.parametrize("split", [False, True], ids=["whole backward", "weight gradients later"])
def test_a_shared_expert_on_its_own_stream_computes_the_same(split: bool):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # training never runs on the default stream
        plain = train(body_of(MOE), split)
        overlapped = body_of(dataclasses.replace(MOE, shared_overlap=True))
        expect_equal(train(overlapped, split, "error"), plain)
        assert overlapped.side is not None and overlapped.side != stream


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", list(DropPolicy))
def test_capacity_waits_for_nothing_and_repeats(policy: DropPolicy, padded: bool):
    moe = dataclasses.replace(MOE, capacity_factor=0.8, drop_policy=policy, pad_to_capacity=padded)
    with torch.cuda.stream(torch.cuda.Stream()):
        first = train(body_of(moe))
        expect_equal(train(body_of(moe), sync="error"), first)
        assert all(out.isfinite().all() for out in first[0])


def test_force_balance_and_jitter_wait_for_nothing():
    moe = dataclasses.replace(MOE, force_balance=True, jitter_eps=0.01)
    with torch.cuda.stream(torch.cuda.Stream()):
        train(body_of(moe), sync="error")
