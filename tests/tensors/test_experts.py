"""A whole mixture-of-experts layer on the fast path against the loop reference, and what it
promises about the device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from app.moe.permute import combine, permute, sort_by_expert
from app.moe.router import aux_loss, aux_routing, choose, route, update_bias, z_loss
from tests.gpu.programs import no_waits
from tests.moe_reference import expert, moe_layer, route_token
from tests.rounding import expect_alike, numbered, plain_and_exact
from tests.tensors.models import grouped_swiglu

Values = dict[str, Tensor]
T, D, FF, E, K = 40, 16, 24, 6, 2
IDLE = 4  # the expert that no token chooses


def draw(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Values:
    """Tokens, router weight and expert weights; the router's offset keeps expert IDLE empty."""
    random = torch.Generator().manual_seed(0)
    shapes = {"x": (T, D), "router": (E, D), "w1": (E, D, 2 * FF), "w2": (E, FF, D)}
    return {
        name: (torch.randn(shape, generator=random) * (1 if name == "x" else 0.3))
        .to(device, dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }


def offset(like: Tensor) -> Tensor:
    return (torch.arange(E, device=like.device) == IDLE) * -100.0


def fast_layer(
    x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, **routing: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, D] and probabilities [T, K] with their experts."""
    logits = F.linear(x.float(), router.float()) + offset(x)
    probs, experts = choose(logits, K, **routing)
    record = sort_by_expert(experts, E)
    return (
        combine(grouped_swiglu(permute(x, record), w1, w2, ends_E=record.ends_E), probs, record),
        probs,
        experts,
    )


def slow_layer(
    x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, **routing: Any
) -> tuple[Tensor, Tensor]:
    """Compute the layer by loops: output [T, D], probabilities [T, E]."""
    logits = F.linear(x, router) + offset(x)
    probs = torch.stack([route_token(row, K, **routing) for row in logits])
    probs.retain_grad()
    return moe_layer(x, probs, w1, w2_EFD=w2), probs


@pytest.mark.parametrize(
    "routing",
    [
        {},
        {"pre_softmax": True, "scale": 1.5},
        {"score": "sigmoid", "groups": 3, "topk_groups": 1},
    ],
    ids=str,
)
def test_layer_and_all_its_gradients_equal_the_reference(routing: dict[str, Any]):
    fast, grad = draw(), torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    out, probs, experts = fast_layer(**fast, **routing)
    probs.retain_grad()
    out.backward(grad)
    assert (
        IDLE not in experts
        and fast["w1"].grad[IDLE].eq(0).all()
        and fast["w2"].grad[IDLE].eq(0).all()
    )

    def by_loops(*values: Tensor) -> tuple[Tensor, ...]:
        given = [value.detach().requires_grad_() for value in values]
        expected, dense = slow_layer(*given, **routing)
        expected.backward(grad.to(expected.dtype))
        return (
            expected,
            dense.gather(1, experts),
            dense.grad.gather(1, experts),
            *(value.grad for value in given),
        )

    found = numbered((out, probs, probs.grad, *(value.grad for value in fast.values())))
    expect_alike(found, *plain_and_exact(by_loops, *fast.values()))


def test_gate_is_the_first_half():
    x, w1, w2 = torch.randn(4, D), torch.randn(1, D, 2 * FF), torch.randn(1, FF, D)
    out = grouped_swiglu(x, w1, w2, ends_E=torch.tensor([4], dtype=torch.int32))

    def by_hand(x: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
        return [(F.silu(x @ w1[0, :, :FF]) * (x @ w1[0, :, FF:])) @ w2[0], expert(x, w1[0], w2[0])]

    expect_alike(numbered([out] * 2), *plain_and_exact(by_hand, x, w1, w2))


def test_expanded_gradients_reach_the_experts():
    values = draw()
    ends = torch.tensor([10, 10, 25, 30, 30, T], dtype=torch.int32)
    grouped_swiglu(values["x"], values["w1"], values["w2"], ends_E=ends).sum().backward()

    def by_hand(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        w1, w2 = (weight.detach().requires_grad_() for weight in weights)
        rows = x.detach().split([10, 0, 15, 5, 0, 10])
        return torch.autograd.grad(
            sum(expert(part, w1[e], w2[e]).sum() for e, part in enumerate(rows)), (w1, w2)
        )

    plain, exact = plain_and_exact(by_hand, *(values[name].detach() for name in ("x", "w1", "w2")))
    expect_alike(numbered(values[name].grad for name in ("w1", "w2")), plain, exact)


def test_no_rows_at_all():
    x, w1, w2 = (
        torch.zeros(0, D, requires_grad=True),
        torch.randn(E, D, 2 * FF, requires_grad=True),
        torch.randn(E, FF, D),
    )
    grouped_swiglu(x, w1, w2, ends_E=torch.zeros(E, dtype=torch.int32)).backward(torch.zeros(0, D))
    assert x.grad.shape == (0, D) and w1.grad.eq(0).all()


def everything(values: Values) -> list[Tensor]:
    """Forward and backward through every function that claims not to wait for the device."""
    routing = {
        "score": "sigmoid",
        "bias_E": values["router"].detach().sum(1),
        "groups": 3,
        "topk_groups": 1,
        "scale": 2.0,
    }
    out, _, experts = fast_layer(**values, **routing)
    logits = F.linear(values["x"].float(), values["router"].float())
    scores, chosen = aux_routing(logits, K, "softmax")
    loss = aux_loss(scores, chosen.sum(0), K, coeff=0.01, num_tokens=len(logits)) + z_loss(
        logits, 0.01
    )
    dense, _ = route(logits, K, pre_softmax=True)
    bias = update_bias(values["router"].detach().sum(1), sort_by_expert(experts, E).ends_E, 0.01)
    grads = torch.autograd.grad(
        out.float().square().sum() + loss + dense.square().sum(), list(values.values())
    )
    return [out.detach(), bias, *grads]


def test_nothing_waits_for_the_device():
    # Fake tensors have no values: reading one (item, nonzero, a boolean mask as index) raises.
    shape_of = {name: value.shape for name, value in draw().items()}
    with FakeTensorMode():
        fake = {
            name: torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            for name, shape in shape_of.items()
        }
        shapes = [tuple(result.shape) for result in everything(fake)]
    assert shapes == [(T, D), (E,), (T, D), (E, D), (E, D, 2 * FF), (E, FF, D)]


def test_repeats_bit_for_bit():
    first, second = everything(draw()), everything(draw())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layer_on_a_gpu_needs_no_sync_repeats_and_is_captured():
    values = draw("cuda", torch.bfloat16)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        everything(values)
        with no_waits():
            eager, again = everything(values), everything(values)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            captured = everything(values)
        graph.replay()
    torch.cuda.synchronize()
    for one, two, three, cpu in zip(
        eager, again, captured, everything(draw(dtype=torch.bfloat16)), strict=True
    ):
        assert torch.equal(one, two) and torch.equal(one, three)
        torch.testing.assert_close(one.cpu(), cpu, rtol=2e-2, atol=2e-2 * cpu.abs().max().item())


def test_only_rows_that_count_are_activated(monkeypatch: pytest.MonkeyPatch):
    """The kernel hears from the device how many these are."""
    counts = []

    def activate(both: Tensor, used: Tensor) -> Tensor:
        counts.append(used.tolist())
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    monkeypatch.setattr("app.model.layers.layers.usable", lambda *_: True)
    monkeypatch.setattr("app.model.layers.layers.swiglu_kernel", activate)
    x, _, w1, w2 = draw().values()
    ends = torch.tensor([3, 3, 7, 9, 9, 12], dtype=torch.int32)
    out = grouped_swiglu(x, w1, w2, ends_E=ends)
    assert counts == [[12]] and len(out) == T
