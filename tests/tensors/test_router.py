"""Routing, balancing losses and bias against the values of Megatron-Core 0.16.1 and against the per-token reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.choices import Score
from app.config import MoEConfig
from app.moe.reference import route_token
from app.moe.router import aux_loss, aux_routing, aux_scores, choose, route, update_bias, z_loss

Json = dict[str, Any]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "router.json").read_text())
NAMES = {"topk": "top_k", "score_function": "score", "use_pre_softmax": "pre_softmax", "num_groups": "groups",
         "group_topk": "topk_groups", "scaling_factor": "scale", "expert_bias": "bias_E"}
# Router features that are not built yet: a golden entry that uses one is listed here by the name of its option.
LATER_LOSSES = {"seq_aux_loss", "global_aux_loss", "sinkhorn"}
LATER_OPTIONS = {
    "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy", "moe_input_jitter_eps",
    "moe_router_force_load_balancing", "moe_router_padding_for_fp8", "moe_router_padding_for_quantization",
}
BUILT = {"num_moe_experts", "moe_router_topk", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
         "moe_router_score_function", "moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_router_bias_update_rate",
         "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor", "calculate_per_token_loss"}


def close(ours: Tensor, golden: Any) -> None:
    torch.testing.assert_close(ours.detach(), torch.tensor(golden, dtype=ours.dtype), rtol=1e-5, atol=1e-6)


def leaf(values: list[Any]) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def lists(map_TE: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in map_TE]


def arguments(args: Json) -> Json:
    ours = {NAMES[key]: value for key, value in args.items()}
    if "bias_E" in ours:
        ours["bias_E"] = torch.tensor(ours["bias_E"])
    return ours


def topk_label(case: Json) -> str:
    return ",".join(f"{key}={'given' if key == 'expert_bias' else value}" for key, value in case["args"].items())


def loss_label(case: Json) -> str:
    return f"{case['score_function']}-{case['topk']}"


@pytest.mark.parametrize("case", GOLDEN["topk"], ids=topk_label)
def test_route_equals_golden(case: Json):
    logits = torch.tensor(case["logits"])
    if "error" in case:
        with pytest.raises(ValueError):
            route(logits, **arguments(case["args"]))
        return
    probs, chosen = route(logits, **arguments(case["args"]))
    close(probs, case["probs"])
    assert chosen.dtype == torch.bool and lists(chosen) == case["selected"]
    compact, experts = choose(logits, **arguments(case["args"]))
    assert experts.tolist() == case["selected"]
    assert torch.equal(probs.gather(1, experts), compact)


@pytest.mark.parametrize("case", GOLDEN["aux_loss"], ids=loss_label)
def test_aux_loss_equals_golden(case: Json):
    logits = leaf(case["logits"])
    scores, chosen = aux_routing(logits, case["topk"], case["score_function"])
    close(scores, case["aux_scores"])
    assert lists(chosen) == case["aux_selected"] and chosen.sum(0).tolist() == case["tokens_per_expert"]
    loss = aux_loss(scores, chosen.sum(0), case["topk"], case["coeff"], len(logits))
    loss.backward()
    close(loss, case["loss"])
    close(logits.grad, case["grad_logits"])


@pytest.mark.parametrize("case", [c for c in GOLDEN["aux_loss"] if "padded" in c], ids=loss_label)
def test_aux_loss_ignores_padding(case: Json):
    logits, padded = leaf(case["logits"]), case["padded"]
    valid = ~torch.tensor(padded["padding_mask_true_is_padding"], dtype=torch.bool)
    scores, chosen = aux_routing(logits, case["topk"], case["score_function"], valid)
    assert chosen.sum() == valid.sum() * case["topk"]
    loss = aux_loss(scores, chosen.sum(0), case["topk"], case["coeff"], valid.sum())
    loss.backward()
    close(loss, padded["loss"])
    close(logits.grad, padded["grad_logits"])


@pytest.mark.parametrize("case", GOLDEN["z_loss"])
def test_z_loss_equals_golden(case: Json):
    valid = ~torch.tensor(case["padding_mask_true_is_padding"], dtype=torch.bool)
    for mask, loss_key, grad_key in ((None, "loss", "grad_logits"), (valid, "loss_padded", "grad_padded")):
        logits = leaf(case["logits"])
        loss = z_loss(logits, case["coeff"], mask)
        loss.backward()
        close(loss, case[loss_key])
        close(logits.grad, case[grad_key])


def test_losses_of_nothing_but_padding_are_zero():
    logits, none_valid = torch.randn(3, 4), torch.zeros(3, dtype=torch.bool)
    scores, chosen = aux_routing(logits, 2, "softmax", none_valid)
    assert not chosen.any() and z_loss(logits, 1.0, none_valid) == 0
    assert aux_loss(scores, chosen.sum(0), 2, 1.0, none_valid.sum().clamp(min=1)) == 0


@pytest.mark.parametrize("case", GOLDEN["expert_bias"])
def test_bias_update_equals_golden(case: Json):
    counts = torch.tensor(case["tokens_per_expert"])
    for kind in (counts, counts.long()):
        close(update_bias(torch.tensor(case["bias"]), kind, case["rate"]), case["updated"])


def later(case: Json) -> set[str]:
    """Names of the options of a golden router entry that are not built yet."""
    config = case["config"]
    kinds = config.get("moe_router_load_balancing_type", "none")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return LATER_LOSSES & set(kinds) | LATER_OPTIONS & {key for key, value in config.items() if value not in (None, False)}


def router_label(case: Json) -> str:
    return ",".join(f"{key.removeprefix('moe_').removeprefix('router_')}={value}" for key, value in case["config"].items())


ENTRIES = GOLDEN["router"]
IN_SCOPE = [case for case in ENTRIES if "error" not in case and not later(case)]


def test_every_golden_router_entry_is_run_refused_or_listed():
    for case in ENTRIES:
        assert case["config"].keys() <= BUILT | LATER_OPTIONS, router_label(case)
    assert {name for case in ENTRIES for name in later(case)} <= LATER_LOSSES | LATER_OPTIONS
    assert len(IN_SCOPE) >= 4


def routing_of(config: Json) -> Json:
    """Arguments of `choose` for a golden router configuration."""
    return {"top_k": config["moe_router_topk"], "score": config.get("moe_router_score_function", "softmax"),
            "pre_softmax": config.get("moe_router_pre_softmax", False), "groups": config.get("moe_router_num_groups"),
            "topk_groups": config.get("moe_router_group_topk"), "scale": config.get("moe_router_topk_scaling_factor")}


def losses_of(config: Json, logits: Tensor, routing: Json) -> dict[str, tuple[Tensor, float]]:
    """Name in the log -> weighted loss and its weight, for the losses a golden configuration switches on."""
    found, kinds, coeffs = {}, config.get("moe_router_load_balancing_type", "none"), config.get("moe_aux_loss_coeff", 0)
    kind, coeff = (kinds[0], coeffs[0]) if isinstance(kinds, list) else (kinds, coeffs)
    if kind == "aux_loss" and coeff:
        scores, chosen = aux_routing(logits, routing["top_k"], routing["score"])
        found["load_balancing_loss"] = (aux_loss(scores, chosen.sum(0), routing["top_k"], coeff, len(logits)), coeff)
    if config.get("moe_z_loss_coeff"):
        found["z_loss"] = (z_loss(logits, config["moe_z_loss_coeff"]), config["moe_z_loss_coeff"])
    return found


@pytest.mark.parametrize("case", IN_SCOPE, ids=router_label)
def test_whole_router_equals_golden(case: Json):
    config, routing = case["config"], routing_of(case["config"])
    bias = torch.tensor(case["expert_bias"]) if config.get("moe_router_enable_expert_bias") else None
    counts = torch.zeros(config["num_moe_experts"])
    for step in case["steps"]:
        weight, inputs = leaf(case["weight"]), leaf(step["input"])
        logits = F.linear(inputs.flatten(0, 1), weight)
        probs, chosen = route(logits, bias_E=bias, **routing)
        close(probs, step["probs"])
        assert lists(chosen) == step["selected"]
        losses = losses_of(config, logits, routing)
        times = len(logits) if config.get("calculate_per_token_loss") else 1
        total = (probs * torch.tensor(step["upstream_grad"])).sum() + sum(loss for loss, _ in losses.values()) * times
        total.backward()
        close(inputs.grad, step["grad_input"])
        close(weight.grad, step["grad_weight"])
        for name, (loss, coeff) in losses.items():
            close(loss / coeff, step["logged"][name][0])
        counts += chosen.sum(0)
        if "local_tokens_per_expert" in step:
            close(counts, step["local_tokens_per_expert"])


REFUSED = [case for case in ENTRIES if "error" in case and "moe_router_num_groups" in case["config"]]


@pytest.mark.parametrize("case", REFUSED, ids=router_label)
def test_impossible_groups_are_refused_by_config_and_function(case: Json):
    config, routing = case["config"], routing_of(case["config"])
    with pytest.raises(ValueError):
        MoEConfig(num_experts=config["num_moe_experts"], top_k=routing["top_k"], score=Score(routing["score"]),
                  groups=routing["groups"], topk_groups=routing["topk_groups"])
    with pytest.raises(ValueError):
        route(torch.zeros(2, config["num_moe_experts"]), **routing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("routing", [
    {"top_k": 1}, {"top_k": 1, "pre_softmax": True}, {"top_k": 12}, {"top_k": 3, "scale": 2.5}, {"top_k": 3, "pre_softmax": True},
    {"top_k": 4, "groups": 3, "topk_groups": 2}, {"top_k": 2, "groups": 6, "topk_groups": 1, "pre_softmax": True},
    {"top_k": 5, "groups": 4, "topk_groups": 2, "scale": 0.5},
], ids=str)
def test_routing_and_its_gradient_equal_the_reference(routing: Json, score: str, dtype: torch.dtype):
    torch.manual_seed(0)
    logits, bias, weight = torch.randn(9, 12, dtype=dtype), torch.randn(12) * 0.2, torch.randn(9, 12, dtype=dtype)
    fast, slow = logits.clone().requires_grad_(), logits.double().requires_grad_()
    probs, chosen = route(fast, score=Score(score), bias_E=bias, **routing)
    expected = torch.stack([route_token(row, score=score, bias_E=bias, **routing) for row in slow])
    assert torch.equal(chosen, expected != 0)
    (probs * weight).sum().backward()
    (expected * weight).sum().backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(probs.double(), expected, **tolerance)
    torch.testing.assert_close(fast.grad.double(), slow.grad, **tolerance)


def test_low_precision_logits_are_scored_in_fp32():
    logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    probs, chosen = route(logits, 4)
    exact, exact_chosen = route(logits.float(), 4)
    assert probs.dtype == torch.bfloat16 and torch.equal(probs, exact.bfloat16()) and torch.equal(chosen, exact_chosen)
    assert choose(logits, 4)[0].dtype == aux_scores(logits, "sigmoid").dtype == z_loss(logits, 1.0).dtype == torch.float32


def test_underflowing_sigmoids_give_no_nan():
    probs, chosen = route(torch.full((2, 4), -500.0), 2, score="sigmoid")
    assert probs.eq(0).all() and chosen.sum() == 4
    assert aux_scores(torch.full((2, 4), -500.0), "sigmoid").eq(0).all()


@pytest.mark.parametrize(("wrong", "words"), [
    ({"top_k": 9}, ("top_k=9", "1 to 8", "works: 8")),
    ({"top_k": 0}, ("top_k=0", "works: 1")),
    ({"top_k": 2, "score": "tanh"}, ("tanh", "softmax, sigmoid")),
    ({"top_k": 2, "groups": 3, "topk_groups": 1}, ("groups=3", "8 experts", "2 or 4")),
    ({"top_k": 2, "groups": 0, "topk_groups": 1}, ("groups=0", "works: 1")),
    ({"top_k": 2, "groups": 4}, ("both or neither",)),
    ({"top_k": 2, "topk_groups": 1}, ("both or neither",)),
    ({"top_k": 8, "groups": 4, "topk_groups": 5}, ("topk_groups=5", "4 groups", "works: 4")),
    ({"top_k": 2, "groups": 4, "topk_groups": 3}, ("topk_groups=3", "top_k=2", "works: 2")),
    ({"top_k": 2, "groups": 4, "topk_groups": 0}, ("topk_groups=0", "works: 1")),
    ({"top_k": 6, "groups": 4, "topk_groups": 2}, ("top_k=6", "4 experts", "works: 4")),
], ids=str)
def test_impossible_routing_is_refused_with_the_numbers(wrong: Json, words: tuple[str, ...]):
    with pytest.raises(ValueError) as refused:
        route(torch.zeros(2, 8), **wrong)
    assert all(word in str(refused.value) for word in words), refused.value
