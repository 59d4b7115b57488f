"""Capacity of experts: what is dropped against golden values, and that nothing is ever read for a
dropped choice.

Shapes: T tokens, K experts per token, E experts, R rows, D width, F hidden width of an expert.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from app.choices import DropPolicy
from app.config import ModelConfig, MoEConfig
from app.config.attention import Rope
from app.errors import ConfigError
from app.model.layers.layer_groups import LayerGroups
from app.model.layers.layers import layer_context
from app.moe.capacity import within_capacity
from app.moe.dispatch.local import LocalDispatcher
from app.moe.permute import combine, permute, sort_by_expert
from app.moe.phases import MoEBody
from app.moe.router import choose
from app.plan.parts.dispatch_record import capacity
from tests.moe_reference import moe_layer
from tests.oracle import oracle
from tests.rounding import expect_alike, expect_sums, in_fp64
from tests.tensors.models import grouped_swiglu

GOLDEN = oracle("router")
T, K, E, D, F = 23, 3, 6, 8, 16
LIMIT = 9  # of 23 · 3 / 6 = 11.5 on average, so that every expert may drop


def test_capacity_equals_golden():
    columns = GOLDEN["capacity"]["columns"]
    cases = [dict(zip(columns, row, strict=True)) for row in GOLDEN["capacity"]["rows"]]
    for case in cases:  # a least capacity is not built: nothing there sets one by default
        if case["min_capacity"] is None:
            assert (
                capacity(case["num_tokens"], case["num_experts"], case["factor"])
                == case["capacity"]
            )
    assert sum(case["min_capacity"] is None for case in cases) >= 5


@pytest.mark.parametrize(
    "case", GOLDEN["token_drop"], ids=lambda case: f"{case['policy']}-{case['pad_to_capacity']}"
)
def test_what_is_dropped_equals_golden(case: dict[str, Any]):
    logits = torch.tensor(case["logits"])
    num_experts = logits.shape[1]
    probs, experts = choose(logits, case["topk"], pre_softmax=bool(case["pre_softmax"]))
    limit = capacity(experts.numel(), num_experts, case["capacity_factor"])
    assert limit == case["capacity"]
    kept = within_capacity(
        probs, experts, num_experts, limit=limit, policy=DropPolicy(case["policy"])
    )
    # among equals the golden choice is arbitrary: compare the intended one
    wanted = case.get("kept_if_first_come", case["kept"])
    assert [row[keep].tolist() for row, keep in zip(experts, kept, strict=True)] == wanted
    if case["kept_matches_ideal"]:
        dense = torch.zeros_like(logits).scatter(1, experts, probs * kept)
        expect_sums(
            {"probs": dense}, {"probs": torch.tensor(case["final_probs"])}, terms=2 * num_experts
        )
    rows = min(limit, len(logits)) if case["pad_to_capacity"] else None
    record = sort_by_expert(
        experts.masked_fill(~kept, num_experts), num_experts, True, rows_per_expert=rows
    )
    counts = record.ends_E.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    ties = not case["kept_matches_ideal"]
    assert (
        sorted(counts) == sorted(case["final_count_per_expert"])
        if ties
        else counts == case["final_count_per_expert"]
    )


def test_equal_probabilities_keep_the_first_tokens():
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2]])
    probs = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.7, 0.3]])
    by_probs = within_capacity(probs, experts, 3, limit=2, policy=DropPolicy.probs)
    assert by_probs.tolist() == [[True, True], [False, True], [False, True], [True, True]]
    by_position = within_capacity(probs, experts, 3, limit=2, policy=DropPolicy.position)
    assert by_position.tolist() == [[True, True], [True, True], [False, True], [False, True]]
    assert within_capacity(probs[:0], experts[:0], 3, limit=0, policy=DropPolicy.probs).shape == (
        0,
        2,
    )


def draw(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Leaves, choices with the id E for the dropped ones, and which are kept; expert 4 has no
    tokens.
    """
    random = torch.Generator().manual_seed(5)
    weights = torch.ones(T, E)
    weights[:, 4] = 0
    experts = weights.multinomial(K, generator=random).sort(dim=1).values
    shapes = {"x": (T, D), "w1": (E, D, 2 * F), "w2": (E, F, D)}
    leaves = {
        name: torch.randn(shape, generator=random).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    leaves["probs"] = torch.rand(T, K, generator=random).requires_grad_()
    kept = within_capacity(leaves["probs"], experts, E, limit=LIMIT, policy=DropPolicy.probs)
    assert not kept.all()
    return leaves, experts.masked_fill(~kept, E), kept


@pytest.mark.parametrize(
    "rows", [None, LIMIT, LIMIT + 4], ids=["as they come", "padded", "padded by more"]
)
def test_dropped_choices_leave_no_trace(rows: int | None):
    """The layer and its gradients equal the loop reference with probability 0 for what is
    dropped.
    """
    leaves, experts, kept = draw()
    record = sort_by_expert(experts, E, True, rows_per_expert=rows)
    rows_RD = grouped_swiglu(
        permute(leaves["x"], record), leaves["w1"], leaves["w2"], ends_E=record.ends_E
    )
    out = combine(rows_RD, leaves["probs"], record)
    grad = torch.randn(T, D)
    out.backward(grad)
    slow = {name: value.detach().double().requires_grad_() for name, value in leaves.items()}
    dense = torch.zeros(T, E + 1, dtype=torch.float64).scatter(1, experts, slow["probs"] * kept)[
        :, :-1
    ]
    exact = moe_layer(slow["x"], dense, slow["w1"], w2_EFD=slow["w2"])
    exact.backward(grad.double())
    for name, ours, theirs in [
        ("out", out, exact),
        *((name, leaves[name].grad, slow[name].grad) for name in leaves),
    ]:
        bound = 1e-5 * theirs.abs() + 1e-5 * theirs.abs().max()
        assert ((ours.double() - theirs).abs() <= bound).all(), name
    assert leaves["probs"].grad[~kept].eq(0).all()


@pytest.mark.parametrize("short", [False, True], ids=["rows nobody owns", "rows left out"])
def test_rows_of_dropped_choices_are_never_read(short: bool):
    leaves, experts, kept = draw()
    record, used = sort_by_expert(experts, E, True), int(kept.sum())
    if short:
        record = dataclasses.replace(record, token_of_row_R=record.token_of_row_R[:used])
    rows = permute(leaves["x"], record)
    spoiled = rows.detach().clone()
    spoiled[used:] = float("nan")
    spoiled.requires_grad_()
    out = combine(spoiled, leaves["probs"], record)
    out.backward(torch.ones_like(out))
    plain = combine(rows, leaves["probs"], record)
    assert torch.equal(out, plain) and not leaves["probs"].grad.isnan().any()
    grad = torch.ones_like(rows)
    grad[used:] = float("nan")
    rows.backward(grad)
    assert torch.equal(leaves["x"].grad, kept.sum(1, keepdim=True).float().expand(T, D))


def test_everything_may_be_dropped():
    record = sort_by_expert(torch.full((4, 2), 3), 3, True)
    record = dataclasses.replace(record, token_of_row_R=record.token_of_row_R[:0])
    x, probs = torch.randn(4, 5, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
    out = combine(permute(x, record), probs, record)
    out.sum().backward()
    assert out.eq(0).all() and x.grad.eq(0).all() and probs.grad.eq(0).all()


MODEL = ModelConfig(num_layers=1, hidden_size=D, num_heads=2, num_kv_heads=2, ffn_hidden_size=16)
MOE = MoEConfig(num_experts=E, top_k=K, ffn_hidden_size=F, capacity_factor=0.7)


def run_body(moe: MoEConfig, x: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
    """Output and gradients of a layer's mixture-of-experts part, and how many choices it
    dropped.
    """
    body = MoEBody(MODEL, moe, LocalDispatcher(E), layer_groups=LayerGroups())
    random = torch.Generator().manual_seed(2)
    for param in body.parameters():
        torch.nn.init.normal_(param, std=0.5, generator=random)
    body, x = body.float(), x.detach().float().requires_grad_()  # fp64 `in_fp64`
    values: dict[str, Any] = {
        "x": x,
        "context": layer_context(torch.zeros(1, 1), None, [Rope(4, 10.0)]),
    }
    for phase in body.phases:
        values.update(
            zip(phase.outputs, phase.run(*(values[name] for name in phase.inputs)), strict=True)
        )
    values["x"].sum().backward()
    grads = {name: param.grad for name, param in body.named_parameters()} | {"x": x.grad}
    return values["x"].detach(), grads, int(values["routing"].dropped)


@pytest.mark.parametrize("policy", list(DropPolicy))
def test_padding_changes_nothing_but_sizes(policy: DropPolicy):
    x = torch.randn(2, 20, D, generator=torch.Generator().manual_seed(1))
    moe = dataclasses.replace(MOE, drop_policy=policy)
    out, grads, dropped = run_body(moe, x)
    padded, padded_grads, padded_dropped = run_body(
        dataclasses.replace(moe, pad_to_capacity=True), x
    )
    whole, _, none = run_body(
        dataclasses.replace(moe, capacity_factor=None, drop_policy=DropPolicy.probs), x
    )
    assert dropped == padded_dropped > 0 and none == 0 and not torch.equal(out, whole)
    with in_fp64():
        exact, exact_grads, _ = run_body(moe, x)
    expect_alike({"out": padded} | padded_grads, {"out": out} | grads, {"out": exact} | exact_grads)
    roomy, _, none = run_body(dataclasses.replace(moe, capacity_factor=float(E)), x)
    assert none == 0 and torch.equal(roomy, whole)


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_waits_for_the_device(padded: bool):
    # Fake tensors have no values: reading one (item, nonzero, a boolean mask as index) raises.
    with FakeTensorMode():
        x = torch.empty(2, 20, D)
        moe = dataclasses.replace(MOE, pad_to_capacity=padded, jitter_eps=0.1, force_balance=True)
        body = MoEBody(MODEL, moe, LocalDispatcher(E), layer_groups=LayerGroups())
        values: dict[str, Any] = {
            "x": x,
            "context": layer_context(torch.zeros(1, 20, dtype=torch.int64), None, [Rope(8, 1e4)]),
        }
        for phase in body.phases[:-3]:  # the experts' grouped GEMMs loop on the host here
            values.update(
                zip(phase.outputs, phase.run(*(values[name] for name in phase.inputs)), strict=True)
            )
        out = combine(values["dispatched"].rows_RD, values["probs"], values["origin"])
        out.sum().backward()
    rows = E * capacity(2 * 20 * K, E, 0.7) if padded else 2 * 20 * K
    assert values["dispatched"].rows_RD.shape == (rows, D) and out.shape == (40, D)


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"capacity_factor": 0.0}, "capacity_factor", ("above 0", "1.0 or null")),
        ({"capacity_factor": -1.0}, "capacity_factor", ("above 0",)),
        (
            {"pad_to_capacity": True},
            "pad_to_capacity",
            ("capacity_factor=null", "false or model.moe.capacity_factor=1.0"),
        ),
        (
            {"drop_policy": DropPolicy.position},
            "drop_policy",
            ("capacity_factor=null", "probs or model.moe.capacity_factor=1.0"),
        ),
        ({"jitter_eps": 1.0}, "jitter_eps", ("below 1", "0.99")),
        ({"jitter_eps": -0.1}, "jitter_eps", ("at least 0",)),
        ({"shared_overlap": True}, "shared_overlap", ("shared expert", "false")),
    ],
    ids=str,
)
def test_impossible_options_are_refused_with_what_works(
    options: dict[str, Any], key: str, words: tuple[str, ...]
):
    with pytest.raises(ConfigError) as refused:
        MoEConfig(**options)
    assert refused.value.key == f"model.moe.{key}"
    assert all(word in str(refused.value) for word in words), refused.value
