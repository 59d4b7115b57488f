"""Routing, balancing losses and bias against the values of Megatron-Core 0.16.1 and against the
per-token reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.choices import Balance, DropPolicy, Score
from app.config import MoEConfig
from app.model.layers.layer_groups import LayerGroups
from app.moe.phases import Router
from app.moe.router import (
    aux_loss,
    aux_routing,
    aux_scores,
    choose,
    in_turn,
    route,
    sequence_aux_loss,
    update_bias,
    z_loss,
)
from app.plan.model.experts import RouterWeights
from tests.moe_reference import route_token
from tests.oracle import oracle
from tests.rounding import expect_alike, expect_sums, numbered, plain_and_exact

Json = dict[str, Any]
GOLDEN = oracle("router")
NAMES = {
    "topk": "top_k",
    "score_function": "score",
    "use_pre_softmax": "pre_softmax",
    "num_groups": "groups",
    "group_topk": "topk_groups",
    "scaling_factor": "scale",
    "expert_bias": "bias_E",
}
# Options of golden router entries that have no counterpart, and why.
LEFT_OUT = {
    "sinkhorn": "a way to balance that no published model uses any more",
    "moe_router_force_load_balancing": "draws at random there; here experts are taken in turn",
    "moe_router_padding_for_fp8": "belongs to FP8, which is not built yet",
    "moe_router_padding_for_quantization": "the same under its later name",
}
COMPARED = {
    "num_moe_experts",
    "moe_router_topk",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "calculate_per_token_loss",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_input_jitter_eps",
}
BALANCES = {
    "aux_loss": Balance.microbatch,
    "seq_aux_loss": Balance.sequence,
    "global_aux_loss": Balance.global_batch,
}
LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def close(ours: Tensor, golden: Any) -> None:
    """Both are fp32: functions of logits of order ten, and means over a few dozen of them."""
    expect_sums({"value": ours}, {"value": torch.tensor(golden, dtype=ours.dtype)}, terms=64)


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
    return ",".join(
        f"{key}={'given' if key == 'expert_bias' else value}" for key, value in case["args"].items()
    )


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
    assert (
        lists(chosen) == case["aux_selected"]
        and chosen.sum(0).tolist() == case["tokens_per_expert"]
    )
    loss = aux_loss(
        scores, chosen.sum(0), case["topk"], coeff=case["coeff"], num_tokens=len(logits)
    )
    loss.backward()
    close(loss, case["loss"])
    close(logits.grad, case["grad_logits"])


def without_padding(values: list[Any], mask: list[int]) -> list[Any]:
    """The rows of tokens that golden masks leave: batches are never padded here, so what is
    padding does not exist.
    """
    return [row for row, padding in zip(values, mask, strict=True) if not padding]


@pytest.mark.parametrize("case", GOLDEN["aux_loss"], ids=loss_label)
def test_aux_loss_equals_golden_without_its_padding(case: Json):
    padded = case["padded"]
    mask = padded["padding_mask_true_is_padding"]
    logits = leaf(without_padding(case["logits"], mask))
    scores, chosen = aux_routing(logits, case["topk"], case["score_function"])
    loss = aux_loss(
        scores, chosen.sum(0), case["topk"], coeff=case["coeff"], num_tokens=len(logits)
    )
    loss.backward()
    close(loss, padded["loss"])
    close(logits.grad, without_padding(padded["grad_logits"], mask))


@pytest.mark.parametrize("case", GOLDEN["z_loss"])
def test_z_loss_equals_golden(case: Json):
    mask = case["padding_mask_true_is_padding"]
    none = [0] * len(mask)
    for left_out, loss_key, grad_key in (
        (none, "loss", "grad_logits"),
        (mask, "loss_padded", "grad_padded"),
    ):
        logits = leaf(without_padding(case["logits"], left_out))
        loss = z_loss(logits, case["coeff"])
        loss.backward()
        close(loss, case[loss_key])
        close(logits.grad, without_padding(case[grad_key], left_out))


@pytest.mark.parametrize("case", GOLDEN["expert_bias"])
def test_bias_update_equals_golden(case: Json):
    counts = torch.tensor(case["tokens_per_expert"])
    for kind in (counts, counts.long()):
        close(update_bias(torch.tensor(case["bias"]), kind, case["rate"]), case["updated"])


def left_out(case: Json) -> set[str]:
    """Options of a golden router entry that have no counterpart."""
    config = case["config"]
    kind = config.get("moe_router_load_balancing_type", "none")
    named = {key for key, value in config.items() if value not in (None, False)} | (
        {kind} if isinstance(kind, str) else set()
    )
    return named & LEFT_OUT.keys()


def router_label(case: Json) -> str:
    return ",".join(
        f"{key.removeprefix('moe_').removeprefix('router_')}={value}"
        for key, value in case["config"].items()
    )


ENTRIES = GOLDEN["router"]
IN_SCOPE = [case for case in ENTRIES if "error" not in case and not left_out(case)]


def test_every_golden_router_entry_is_run_refused_or_listed():
    for case in ENTRIES:
        assert case["config"].keys() <= COMPARED | LEFT_OUT.keys(), router_label(case)
    assert len(IN_SCOPE) >= 5


def moe_of(config: Json) -> MoEConfig:
    """A golden router configuration in our words."""
    kind, score = (
        config.get("moe_router_load_balancing_type", "none"),
        Score(config.get("moe_router_score_function", "softmax")),
    )
    bias = (
        config.get("moe_router_bias_update_rate", 1e-3)
        if config.get("moe_router_enable_expert_bias")
        else 0.0
    )
    return MoEConfig(
        num_experts=config["num_moe_experts"],
        top_k=config["moe_router_topk"],
        score=score,
        pre_softmax=config.get("moe_router_pre_softmax", False),
        groups=config.get("moe_router_num_groups"),
        topk_groups=config.get("moe_router_group_topk"),
        routed_scale=config.get("moe_router_topk_scaling_factor"),
        aux_loss_coeff=config.get("moe_aux_loss_coeff", 0.0) if kind in BALANCES else 0.0,
        balance=BALANCES.get(kind, Balance.microbatch),
        z_loss_coeff=config.get("moe_z_loss_coeff") or 0.0,
        bias_update_rate=bias,
        capacity_factor=config.get("moe_expert_capacity_factor"),
        pad_to_capacity=config.get("moe_pad_expert_input_to_capacity", False),
        drop_policy=DropPolicy(config.get("moe_token_drop_policy", "probs")),
        jitter_eps=config.get("moe_input_jitter_eps") or 0.0,
    )


@pytest.mark.parametrize("case", IN_SCOPE, ids=router_label)
def test_whole_router_equals_golden(case: Json):
    config, moe = case["config"], moe_of(case["config"])
    router, counts = (
        Router(RouterWeights.of(len(case["weight"][0]), moe.num_experts), moe, LayerGroups()),
        torch.zeros(moe.num_experts, dtype=torch.int64),
    )
    router.bias_E.copy_(torch.tensor(case.get("expert_bias", [0.0] * moe.num_experts)))
    for step in case["steps"]:
        router.weight = torch.nn.Parameter(torch.tensor(case["weight"]))
        inputs = leaf(step["input"])
        compact, experts, report = router(inputs.transpose(0, 1))  # ours are sequences of tokens
        dense = compact.new_zeros(len(experts), moe.num_experts + 1).scatter(1, experts, compact)[
            :, :-1
        ]
        probs = dense.unflatten(0, (inputs.shape[1], -1)).transpose(0, 1).flatten(0, 1)
        close(probs, step["probs"])
        assert lists(probs != 0) == step["selected"] or moe.pad_to_capacity
        times = len(probs) if config.get("calculate_per_token_loss") else 1
        ((probs * torch.tensor(step["upstream_grad"])).sum() + report.loss * times).backward()
        close(inputs.grad, step["grad_input"])
        close(router.weight.grad, step["grad_weight"])
        if moe.aux_loss_coeff:
            close(
                report.aux_loss / moe.aux_loss_coeff,
                step["logged"][LOGGED[config["moe_router_load_balancing_type"]]][0],
            )
        if moe.z_loss_coeff:
            close(report.z_loss / moe.z_loss_coeff, step["logged"]["z_loss"][0])
        counts += report.counts_E
        assert report.counts_E.sum() + report.dropped == experts.numel()
        if "local_tokens_per_expert" in step:
            assert counts.tolist() == step["local_tokens_per_expert"]


def test_sequence_loss_is_the_mean_over_sequences():
    logits = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))

    def together(logits: Tensor) -> Tensor:
        scores, chosen = (
            part.unflatten(0, (3, 5)) for part in aux_routing(logits.flatten(0, 1), 2, "sigmoid")
        )
        return sequence_aux_loss(scores, chosen.sum(1), 2, coeff=0.3, num_tokens=5)

    def apart(logits: Tensor) -> Tensor:
        parts = (aux_routing(row, 2, "sigmoid") for row in logits)
        return torch.stack(
            [
                aux_loss(scores, chosen.sum(0), 2, coeff=0.3, num_tokens=5)
                for scores, chosen in parts
            ]
        ).mean()

    def with_gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        found = loss(leaf)
        return found.detach(), *torch.autograd.grad(found, leaf)

    expected = plain_and_exact(partial(with_gradient, apart), logits)
    expect_alike(numbered(with_gradient(together, logits)), *expected)


def router_of(**options: Any) -> Router:
    """A router of 8 experts for width 6 with drawn weights."""
    moe = MoEConfig(num_experts=8, top_k=3, **options)
    router = Router(RouterWeights.of(6, moe.num_experts), moe, LayerGroups())
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router


def test_the_load_of_the_global_batch_is_the_mean_so_far():
    router, plain = (
        router_of(balance=Balance.global_batch, aux_loss_coeff=0.5),
        router_of(aux_loss_coeff=0.5),
    )
    inputs = [
        torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    ]
    first = [router(x)[2].aux_loss.item() for x in inputs]
    assert first[0] == plain(inputs[0])[2].aux_loss.item()
    logits = [F.linear(x.flatten(0, 1), router.weight) for x in inputs]
    counts = torch.stack([aux_routing(part, 3, "softmax")[1].sum(0) for part in logits])
    for number, part in enumerate(logits, start=1):
        expected = aux_loss(
            aux_routing(part, 3, "softmax")[0],
            counts[:number].double().mean(0).float(),
            3,
            coeff=0.5,
            num_tokens=8,
        )
        expect_sums(
            {"loss": first[number - 1]}, {"loss": expected}, terms=8 * 8
        )  # tokens and experts
    assert router(inputs[0])[2].aux_loss.item() != first[0]
    router.start_step()
    assert [router(x)[2].aux_loss.item() for x in inputs] == first
    assert not any("load" in name for name in router.state_dict())


def test_jitter_changes_the_input_in_training_only():
    router, still, x = router_of(jitter_eps=0.1), router_of(), torch.ones(1, 200, 6)
    torch.manual_seed(3)
    noisy = router(x)[0]
    torch.manual_seed(3)
    assert torch.equal(router(x)[0], noisy), "the device's default generator decides"
    with torch.no_grad():
        assert torch.equal(router(x)[0], still(x)[0])
    assert not torch.equal(noisy, still(x)[0])
    moved = router._jittered(torch.ones(1000, 6))
    assert 0.9 <= moved.min() < 0.91 and 1.09 < moved.max() <= 1.1
    router.zero_grad()
    router(x)[0].square().sum().backward()
    assert router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("score", list(Score))
def test_forced_balance_is_even_and_keeps_the_gradients(score: Score):
    router, x = router_of(force_balance=True, score=score, aux_loss_coeff=0), torch.randn(2, 16, 6)
    probs, experts, report = router(x)
    assert report.counts_E.tolist() == [12] * 8
    logits = F.linear(x.flatten(0, 1), router.weight)
    weights = {
        Score.softmax: logits,
        Score.sigmoid: logits.sigmoid(),
        Score.softmax_bias: logits.softmax(1),
    }[score]
    picked = weights.gather(1, experts)
    expected = picked.softmax(1) if score is Score.softmax else picked / picked.sum(1, keepdim=True)
    expect_sums({"probs": probs}, {"probs": expected}, terms=2 * 3)
    (probs * torch.randn_like(probs)).sum().backward()
    assert router.weight.grad.abs().min() > 0


def test_turns_resume_from_rank_to_rank():
    like = torch.zeros(5, 8)
    turns = [in_turn(like, 3, rank * 15) for rank in range(8)]
    assert turns[0].tolist() == [[0, 1, 2], [3, 4, 5], [0, 6, 7], [1, 2, 3], [4, 5, 6]]
    assert turns[1][0].tolist() == [0, 1, 7]
    assert torch.cat(turns).flatten().bincount(minlength=8).tolist() == [15] * 8
    assert in_turn(like[:0], 3).shape == (0, 3)


REFUSED = [
    case for case in ENTRIES if "error" in case and "moe_router_num_groups" in case["config"]
]


@pytest.mark.parametrize("case", REFUSED, ids=router_label)
def test_impossible_groups_are_refused_by_config_and_function(case: Json):
    config = case["config"]
    with pytest.raises(ValueError):
        moe_of(config)
    with pytest.raises(ValueError):
        route(
            torch.zeros(2, config["num_moe_experts"]),
            config["moe_router_topk"],
            groups=config["moe_router_num_groups"],
            topk_groups=config["moe_router_group_topk"],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "routing",
    [
        {"top_k": 1},
        {"top_k": 1, "pre_softmax": True},
        {"top_k": 12},
        {"top_k": 3, "scale": 2.5},
        {"top_k": 3, "pre_softmax": True},
        {"top_k": 4, "groups": 3, "topk_groups": 2},
        {"top_k": 4, "groups": 3, "topk_groups": 2, "group_best": 1},
        {"top_k": 2, "groups": 6, "topk_groups": 1, "pre_softmax": True},
        {"top_k": 5, "groups": 4, "topk_groups": 2, "scale": 0.5},
    ],
    ids=str,
)
def test_routing_and_its_gradient_equal_the_reference(
    routing: Json, score: str, dtype: torch.dtype
):
    torch.manual_seed(0)
    logits, bias, weight = (
        torch.randn(9, 12, dtype=dtype),
        torch.randn(12) * 0.2,
        torch.randn(9, 12, dtype=dtype),
    )
    fast, slow = logits.clone().requires_grad_(), logits.double().requires_grad_()
    probs, chosen = route(fast, score=Score(score), bias_E=bias, **routing)
    expected = torch.stack([route_token(row, score=score, bias_E=bias, **routing) for row in slow])
    assert torch.equal(chosen, expected != 0)
    (probs * weight).sum().backward()
    (expected * weight).sum().backward()
    wanted = {"probs": expected, "d logits": slow.grad}
    expect_sums({"probs": probs, "d logits": fast.grad}, wanted, terms=2 * 12, dtype=dtype)


def test_low_precision_logits_are_scored_in_fp32():
    logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    probs, chosen = route(logits, 4)
    exact, exact_chosen = route(logits.float(), 4)
    assert (
        probs.dtype == torch.bfloat16
        and torch.equal(probs, exact.bfloat16())
        and torch.equal(chosen, exact_chosen)
    )
    assert (
        choose(logits, 4)[0].dtype
        == aux_scores(logits, "sigmoid").dtype
        == z_loss(logits, 1.0).dtype
        == torch.float32
    )


def test_underflowing_sigmoids_give_no_nan():
    probs, chosen = route(torch.full((2, 4), -500.0), 2, score="sigmoid")
    assert probs.eq(0).all() and chosen.sum() == 4
    assert aux_scores(torch.full((2, 4), -500.0), "sigmoid").eq(0).all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
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
    ],
    ids=str,
)
def test_impossible_routing_is_refused_with_the_numbers(wrong: Json, words: tuple[str, ...]):
    with pytest.raises(ValueError) as refused:
        route(torch.zeros(2, 8), **wrong)
    assert all(word in str(refused.value) for word in words), refused.value


def test_softmax_with_a_bias_is_that_of_its_formula():
    random = torch.Generator().manual_seed(4)
    logits_TE, bias_E = torch.randn(5, 8, generator=random), torch.randn(8, generator=random)
    probs_TE, chosen_TE = route(logits_TE, 3, Score.softmax_bias, bias_E=bias_E)
    scores_TE = logits_TE.softmax(1)
    best_TK = (scores_TE + bias_E).topk(3).indices
    assert torch.equal(chosen_TE, torch.zeros(5, 8, dtype=torch.bool).scatter(1, best_TK, True))
    kept_TE = scores_TE * chosen_TE
    torch.testing.assert_close(probs_TE, kept_TE / kept_TE.sum(1, keepdim=True))
    unbiased = route(logits_TE, 3, Score.softmax_bias)[1]
    assert not torch.equal(unbiased, chosen_TE), "the bias must decide somewhere"


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("normalises", [True, False])
def test_sigmoid_scores_are_normalised_as_told(top_k: int, normalises: bool):
    logits_TE = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))
    probs_TE, chosen_TE = route(logits_TE, top_k, Score.sigmoid, norm_topk_prob=normalises)
    scores_TE = logits_TE.sigmoid() * chosen_TE
    expected_TE = scores_TE / scores_TE.sum(1, keepdim=True) if normalises else scores_TE
    torch.testing.assert_close(probs_TE, expected_TE)
    usual_TE, _ = route(logits_TE, top_k, Score.sigmoid)
    assert torch.equal(usual_TE, probs_TE) == (normalises is (top_k > 1))


def test_a_router_normalises_sigmoids_as_configured():
    x_BsD = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(4))
    sums = []
    for normalises in (None, True, False):
        moe = MoEConfig(num_experts=8, top_k=1, score=Score.sigmoid, norm_topk_prob=normalises)
        router = Router(RouterWeights.of(16, moe.num_experts), moe, LayerGroups())
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(5))
        probs_TK, _, _ = router(x_BsD)
        sums.append(probs_TK.sum(1))
        assert moe.normalizes_sigmoids is bool(normalises)
    assert torch.equal(sums[0], sums[2]) and not torch.equal(sums[0], sums[1])
    torch.testing.assert_close(sums[1], torch.ones(6))
