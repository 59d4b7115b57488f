"""Linear modules alone: values, every way a weight's gradient can take, one back end for all GEMMs
of layers, and global names.

Shapes: B sequences, S tokens, IN and OUT widths, T rows, E experts.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import app.model.layers.linear
from app.model.layers.linear import (
    ColumnParallelLinear,
    GroupedLinear,
    LinearModule,
    RowParallelLinear,
    TorchGroupedLinear,
    TorchLinear,
    VocabParallelEmbedding,
    named_parameters,
)
from app.model.layers.weight_grads import MainGradSink, WeightGrad, WeightGradQueue
from app.plan.model.weight import Weight
from tests.rounding import expect_alike, plain_and_exact
from tests.runs import TINY, TINY_MOE
from tests.tensors.models import draw_tokens, make_chunk

B, S, IN, OUT = 2, 5, 8, 12
T, E = 20, 4
ENDS = (5, 5, 12, 18)  # the second expert has no rows, and two rows belong to nobody
ROUTES = ("autograd", "at once", "deferred")
NAMES = ("out", "input", "weight")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(module: nn.Module, route: str, grad: Tensor, *given: Tensor) -> dict[str, Tensor]:
    """Output of the module for `given`, and the gradients of its input and of its weight, which
    goes by `route`.
    """
    total = torch.zeros_like(module.weight)

    def add(param: nn.Parameter, gradient: WeightGrad) -> None:
        assert param is module.weight
        gradient.add_to(total)

    queue = WeightGradQueue()
    sink = {"autograd": None, "at once": MainGradSink(add), "deferred": queue}[route]
    x = given[0].clone().requires_grad_()
    out = module(x, *given[1:], sink)
    out.backward(grad)
    if route == "deferred":
        assert not total.any()
        queue.run(add)
    if route == "autograd":
        total = module.weight.grad
    else:
        assert module.weight.grad is None
    return dict(zip(NAMES, (out.detach(), x.grad, total), strict=True))


def named(values: Any) -> dict[str, Any]:
    return dict(zip(NAMES, values.values(), strict=True))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding])
def test_gemms_of_one_weight(kind: type[ColumnParallelLinear], route: str):
    module, x, grad = kind(Weight((OUT, IN))), normal(B, S, IN), normal(B, S, OUT, seed=1)
    module.weight.data = normal(OUT, IN, seed=2)

    def by_hand(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        rows, grads = x.flatten(0, 1), grad.flatten(0, 1)
        weight_grad = sum(torch.outer(*pair) for pair in zip(grads, rows, strict=True))
        return [F.linear(x, weight), grad @ weight, weight_grad]

    found = results(module, route, grad, x)
    plain, exact = plain_and_exact(by_hand, x, module.weight.data, grad)
    expect_alike(found, named(plain), named(exact))
    assert torch.equal(found["out"], plain["0"])


@pytest.mark.parametrize("route", ROUTES)
def test_gemms_of_a_weight_per_expert(route: str):
    module, rows, grad = GroupedLinear(Weight((E, IN, OUT))), normal(T, IN), normal(T, OUT, seed=1)
    module.weight.data = normal(E, IN, OUT, seed=2)
    last = ENDS[-1]

    def by_loops(rows: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        parts = [slice(*bounds) for bounds in zip((0, *ENDS), ENDS, strict=False)]
        out = torch.cat([rows[part] @ weight[e] for e, part in enumerate(parts)])
        back = torch.cat([grad[part] @ weight[e].T for e, part in enumerate(parts)])
        return [out, back, torch.stack([rows[part].T @ grad[part] for part in parts])]

    found = results(module, route, grad, rows, torch.tensor(ENDS, dtype=torch.int32))
    found = {name: v if name == "weight" else v[:last] for name, v in found.items()}
    plain, exact = plain_and_exact(by_loops, rows, module.weight.data, grad)
    expect_alike(found, named(plain), named(exact))
    assert found["weight"][1].eq(0).all()


def test_gradients_that_wait_are_those_added_at_once():
    given = {
        ColumnParallelLinear(Weight((OUT, IN))): (normal(B, S, OUT, seed=1), normal(B, S, IN)),
        GroupedLinear(Weight((E, IN, OUT))): (
            *(normal(T, OUT, seed=1), normal(T, IN)),
            torch.tensor((5, 5, 12, T), dtype=torch.int32),
        ),
    }
    for module, values in given.items():
        module.weight.data.copy_(normal(*module.weight.shape, seed=2))
        at_once, deferred = (results(module, route, *values) for route in ROUTES[1:])
        assert all(torch.equal(at_once[name], deferred[name]) for name in NAMES)


def counted(name: str, backend: type[Any], counts: Counter[tuple[str, str]]) -> Any:
    """Back end of a kind that counts the GEMMs it computes."""

    class Counted(backend):  # type: ignore[misc]
        def output(self, *given: Any) -> Tensor:
            counts[name, "output"] += 1
            return super().output(*given)

        def input_grad(self, *given: Any) -> Tensor:
            counts[name, "input_grad"] += 1
            return super().input_grad(*given)

        def weight_grad(self, *given: Any) -> WeightGrad:
            counts[name, "weight_grad"] += 1
            return super().weight_grad(*given)

    return Counted()


@pytest.mark.parametrize("chunk_tokens", [None, 6])
def test_one_back_end_computes_every_gemm(
    chunk_tokens: int | None, monkeypatch: pytest.MonkeyPatch
):
    """GEMMs of the layers and of the head in the loss: 16 tokens are 3 chunks."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, kind in (("linear", TorchLinear), ("grouped_linear", TorchGroupedLinear)):
        backend = counted(name, kind, counts)
        monkeypatch.setattr(app.model.layers.linear, kind.__name__, lambda backend=backend: backend)
    chunk = make_chunk(dataclasses.replace(TINY, moe=TINY_MOE))
    chunk.chunk_tokens = chunk_tokens
    inside = [module for module in chunk.layers.modules() if isinstance(module, LinearModule)]
    grouped = sum(isinstance(module, GroupedLinear) for module in inside)
    kinds = {"linear": len(inside) - grouped, "grouped_linear": grouped}
    assert all(kinds.values())
    arrived: Counter[nn.Parameter] = Counter()
    sink = MainGradSink(lambda param, gradient: arrived.update([param]))
    tokens = draw_tokens(TINY, 2, 9)
    context = chunk.context(torch.arange(8).expand(2, 8), None, sink)
    chunk.loss(chunk(tokens[:, :-1], context).x, tokens[:, 1:], context).backward()
    gemms = ("output", "input_grad", "weight_grad")
    grouped_counts, linear_counts = (
        [counts[kind, name] for name in gemms] for kind in ("grouped_linear", "linear")
    )
    assert grouped_counts == [grouped] * 3
    head = [1, 1, 1] if chunk_tokens is None else [2 * 3, 3, 3]  # backward makes logits again
    assert linear_counts == [kinds["linear"] + of_head for of_head in head]
    # one gradient of each weight; that of the looked up table is autograd's
    assert chunk.head is not None and chunk.embedding is not None
    assert arrived == Counter(module.weight for module in [*inside, chunk.head])
    assert chunk.embedding.weight.grad is not None
    chunk.logits(torch.zeros(1, 1, TINY.hidden_size))
    assert counts["linear", "output"] == linear_counts[0] + 1


def test_every_parameter_has_one_name():
    chunk = make_chunk(TINY)
    found = dict(named_parameters(chunk))
    assert [*found.values()] == [*chunk.parameters()]
    assert {name.rsplit(".", 1)[-1] for name in found} == {
        *("wqkv", "wo", "w_up", "w_down", "embedding", "head", "weight"),
    }
    lone = ColumnParallelLinear(Weight((OUT, IN)))
    assert [name for name, _ in named_parameters(lone)] == ["weight"]
