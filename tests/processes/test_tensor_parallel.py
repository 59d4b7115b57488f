"""Matrices and a vocabulary cut over ranks: values of Megatron-Core, and whole matrices on one
rank.

Shapes: B sequences, S tokens per sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from app.config import ModelConfig
from app.model.chunk import Chunk
from app.model.layers import linear as linear_layers
from app.model.layers.layer_groups import LayerGroups
from app.model.layers.layers import Mlp
from app.model.layers.linear import ColumnParallelLinear, TorchLinear, VocabParallelEmbedding
from app.model.layers.loss import PLAIN as UNPADDED
from app.model.layers.loss import summed_loss
from app.model.layers.weight_grads import MainGradSink, WeightGrad, WeightGradQueue
from app.plan.model.mlp import MlpWeights
from app.plan.model.weight import Weight
from tests.distributed import run_distributed
from tests.forks import Patches
from tests.oracle import oracle
from tests.rounding import expect_alike, expect_sums, in_fp64, numbered

GOLDEN = oracle("numerics")["cross_entropy_tp"]
PLAIN = [case for case in GOLDEN if not case["label_smoothing"]]


def golden_loss(rank: int, case: dict[str, Any], chunk: int | None) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the logits, with the logits for hidden states and an identity for
    weights.
    """
    logits_BSV, labels_BS = torch.tensor(case["logits"]), torch.tensor(case["target"])
    ranks, (_, length, vocab) = case["tp"], logits_BSV.shape
    missing = -length % ranks  # sequences divide over the ranks
    logits_BSV, labels_BS = (
        F.pad(logits_BSV, (0, 0, 0, missing)),
        F.pad(labels_BS, (0, missing), value=-100),
    )
    own = slice(rank * vocab // ranks, (rank + 1) * vocab // ranks)
    h = logits_BSV.chunk(ranks, dim=1)[rank].clone().requires_grad_()
    loss, _ = summed_loss(
        h,
        nn.Parameter(torch.eye(vocab)[own].clone()),
        labels_BS,
        backend=TorchLinear(),
        group=dist.group.WORLD,
        chunk_tokens=chunk,
    )
    loss.backward()
    return loss.item(), h.grad.numpy()


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: f"tp{case['tp']}")
def test_loss_equals_golden(case: dict[str, Any], chunk: int | None):
    vocab = len(case["logits"][0][0])
    losses, grads = zip(*run_distributed(golden_loss, case["tp"], case, chunk), strict=True)
    wanted = torch.tensor(case["grad_logits"]) / torch.tensor(case["upstream"])[..., None]
    found = torch.cat([torch.from_numpy(grad) for grad in grads], dim=1)
    expect_sums({"gradient": found[:, : wanted.shape[1]]}, {"gradient": wanted}, terms=2 * vocab)
    assert not found[:, wanted.shape[1] :].any()
    total = torch.tensor(case["loss_per_rank"][0]).sum().item()
    assert set(losses) == {losses[0]}
    expect_sums({"loss": losses[0]}, {"loss": total}, terms=2 * vocab)


def odd_losses(rank: int, vocab: int) -> bool:
    """Whether this rank pads its logits, which then have the values of unpadded ones."""
    model = ModelConfig(num_layers=1, hidden_size=16, vocab_size=vocab)
    head = Chunk(
        model, {}, embedding=False, head=True, layer_groups=LayerGroups(tp=dist.group.WORLD)
    )
    generator = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(vocab, 16, generator=generator)
    head.table.weight.data = weight_VD.chunk(dist.get_world_size())[rank].clone()
    h, labels_BS = (
        torch.randn(2, 4, 16, generator=generator),
        torch.randint(-1, vocab, (2, 8), generator=generator),
    )
    context, found = head.context(torch.arange(8).expand(2, 8), None), []
    padded = head.logit_map is not UNPADDED
    for logits in (head.logit_map, UNPADDED):
        head.logit_map, leaf = logits, h.clone().requires_grad_()
        loss = head.loss(leaf, labels_BS, context)
        grads = torch.autograd.grad(loss, (leaf, head.table.weight))
        found.append(numbered((loss, *grads, head.losses(h, labels_BS))))
    expect_sums(*found, terms=vocab)
    return padded


@pytest.mark.parametrize(("vocab", "pads"), [(270, True), (272, False)])
def test_odd_part_of_a_vocabulary_is_padded(vocab: int, pads: bool):
    assert run_distributed(odd_losses, 2, vocab) == [pads] * 2


def embedded(rank: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    embedding = VocabParallelEmbedding(Weight((12, 5), tp=0), LayerGroups(tp=dist.group.WORLD))
    embedding.weight.data = table.chunk(dist.get_world_size())[rank].clone()
    x = embedding.lookup(tokens)
    weights = torch.arange(40.0).view(2, 4, 5).chunk(dist.get_world_size(), dim=1)[rank]
    (x * weights).sum().backward()
    return x.detach().numpy(), embedding.weight.grad.numpy()


@pytest.mark.parametrize("ranks", [2, 4])
def test_lookup_equals_one_rank(ranks: int):
    tokens = torch.tensor([[0, 11, 3, 3], [5, 6, 7, 11]])
    (whole, whole_grad), parts = (
        run_distributed(embedded, 1, tokens)[0],
        run_distributed(embedded, ranks, tokens),
    )
    assert (
        torch.cat([torch.from_numpy(x) for x, _ in parts], dim=1) == torch.from_numpy(whole)
    ).all()
    assert (
        torch.cat([torch.from_numpy(grad) for _, grad in parts]) == torch.from_numpy(whole_grad)
    ).all()


ROUTES = ("autograd", "at once", "deferred")


def feed_forward(rank: int, routes: Sequence[str] = ROUTES) -> dict[str, dict[str, Any]]:
    """By each route of the weights' gradients, for this rank's tokens and its parts of the same
    matrices: output, and gradients of the input and of both weights, gate and up stacked.
    """
    return {route: one_route(rank, route) for route in routes}


def one_route(rank: int, route: str) -> dict[str, Any]:
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(0)
    mlp = Mlp(MlpWeights.of(8, 12), LayerGroups(tp=dist.group.WORLD))
    gate_up, down, x = (
        torch.randn(*shape, generator=generator).float()
        for shape in ((2, 12, 8), (8, 12), (2, 4, 8))
    )
    up, back = mlp.w_up.weight, mlp.w_down.weight
    up.data = gate_up.chunk(ranks, dim=1)[rank].flatten(0, 1).clone()
    back.data = down.chunk(ranks, dim=1)[rank].clone()
    sums = {param: torch.zeros_like(param) for param in (up, back)}
    queue = WeightGradQueue()

    def add(param: nn.Parameter, gradient: WeightGrad) -> None:
        gradient.add_to(sums[param])

    own = x.chunk(ranks, dim=1)[rank].clone().requires_grad_()
    out = mlp(own, {"autograd": None, "at once": MainGradSink(add), "deferred": queue}[route])
    out.square().sum().backward()
    assert route != "deferred" or not any(total.any() for total in sums.values())
    queue.run(add)
    if route == "autograd":
        sums = {param: param.grad for param in sums}
    found = {"out": out, "gradient": own.grad}
    found |= {"w_up": sums[up].view(2, -1, 8), "w_down": sums[back]}
    return {name: value.detach().numpy() for name, value in found.items()}


def exact_feed_forward(rank: int) -> dict[str, dict[str, Any]]:
    with in_fp64():
        return feed_forward(rank, ["autograd"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_feed_forward_equals_one_rank(ranks: int):
    one = run_distributed(feed_forward, 1)[0]
    plain, exact = one["autograd"], run_distributed(exact_feed_forward, 1)[0]["autograd"]
    several = run_distributed(feed_forward, ranks)
    for route, parts in [
        *((route, [one]) for route in ROUTES[1:]),
        *((route, several) for route in ROUTES),
    ]:
        # tokens of a rank, and columns or rows of the hidden width of its matrices
        found = {
            name: np.concatenate([part[route][name] for part in parts], axis=1) for name in plain
        }
        for name in plain:
            expect_alike(*({name: values[name]} for values in (found, plain, exact)), case=route)


def order_of_backward(rank: int, route: str) -> list[str]:
    """Return the order of a column-parallel backward's GEMMs, all-reduces and waits."""
    seen: list[str] = []

    def noted(function: Callable[..., Any], name: str, arrival: str = "") -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen.append(name)
            result = function(*args)
            return noted(result, arrival) if arrival else result

        return run

    def add(param: nn.Parameter, gradient: WeightGrad) -> None:
        gradient()

    module = ColumnParallelLinear(Weight((6, 4), tp=0), LayerGroups(tp=dist.group.WORLD))
    backend = TorchLinear()
    nn.init.ones_(module.weight)
    for name in ("output", "input_grad", "weight_grad"):
        setattr(backend, name, noted(getattr(backend, name), name))
    module.backend = backend
    queue = WeightGradQueue()
    sink = {"autograd": None, "at once": MainGradSink(add), "deferred": queue}[route]
    out = module(torch.ones(1, 2, 4, requires_grad=True), sink)
    with Patches.context() as patch:
        for name, arrival in (("start_gather", "gathered"), ("start_scatter", "scattered")):
            start = noted(getattr(linear_layers, name), name, arrival)
            patch.setattr(linear_layers, name, start)
        out.sum().backward()
    seen.append("later")
    queue.run(add)
    return seen


@pytest.mark.parametrize("route", ROUTES)
def test_backward_communication_overlaps_gemms(route: str):
    beside = ["start_gather", "input_grad", "start_scatter", "gathered", "weight_grad", "scattered"]
    deferred = ["input_grad", "later", "weight_grad"]
    expected = deferred if route == "deferred" else [*beside, "later"]
    assert run_distributed(order_of_backward, 2, route) == [["output", *expected]] * 2
