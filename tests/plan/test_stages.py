from __future__ import annotations

from itertools import product

import pytest

from app.errors import ConfigError, Instead
from app.plan.dependencies import Pipeline
from app.plan.stages import Stage, StagePlan, parse_layout, plan_stages
from tests.cases import each
from tests.oracle import oracle

# Megatron-Core 0.16.1
GOLDEN = oracle("layers")
PLANNED = [case for case in GOLDEN["cases"] if not case["args"].get("mtp")]
WITH_MTP = [case for case in GOLDEN["cases"] if case["args"].get("mtp")]


def planned(args: dict) -> StagePlan:
    counted = {"count_embedding": args.get("emb", False), "count_head": args.get("loss", False)}
    set_by_hand = {key: args[key] for key in ("first", "last", "layout") if key in args}
    return plan_stages(
        args["num_layers"],
        args["pp"],
        args.get("vpp") or 1,
        **set_by_hand,
        **counted,
        behind=args.get("mtp", 0),
    )


def layers_of(plan: StagePlan) -> list[list[list[int]]]:
    return [[list(stage.layers) for stage in rank] for rank in plan.stages]


@each(PLANNED)
def test_stages_equal_the_golden_ones(case: dict):
    plan = planned(case["args"])
    numbers = zip(case["offset"], case["num_layers"], strict=True)
    layers = [
        [list(range(at, at + number)) for at, number in zip(*rank, strict=True)] for rank in numbers
    ]
    assert layers_of(plan) == case.get("layer_ids", layers)
    assert (plan.pp, plan.vpp) == (case["args"]["pp"], case["vpp_effective"] or 1)
    grid = case.get("layout_grid")
    for rank, chunk in product(range(plan.pp), range(plan.vpp)):
        first, last = (rank, chunk) == (0, 0), (rank, chunk) == (plan.pp - 1, plan.vpp - 1)
        embedding, head = (
            ("E" in grid[rank][chunk], "L" in grid[rank][chunk]) if grid else (first, last)
        )
        assert (plan.stages[rank][chunk].embedding, plan.stages[rank][chunk].head) == (
            embedding,
            head,
        )


@each(GOLDEN["invalid"])
def test_refuses_what_the_golden_one_refuses(case: dict):
    with pytest.raises(ConfigError):
        planned(case["args"])


@each(WITH_MTP)
def test_multi_token_prediction_is_on_the_last_stage(case: dict):
    if case["mtp_standalone"]:
        with pytest.raises(ConfigError, match="multi-token prediction, right before L"):
            planned(case["args"])
        return
    layers, count = layers_of(planned(case["args"])), case["args"]["num_layers"]
    assert [[[n for n in own if n < count] for own in rank] for rank in layers] == case["layer_ids"]
    ahead = [[sum(n >= count for n in own) for own in rank] for rank in layers]
    assert ahead == case["mtp_layers"]


@each(["Et|tm|tL", "Et|t|tmmL", "Emt|t|tL"])
def test_misplaced_predictions_get_the_layout_that_works(layout: str):
    with pytest.raises(ConfigError) as refused:
        plan_stages(3, 3, layout=layout, behind=1)
    assert "Et|t|tmL" in str(refused.value)
    plan_stages(3, 3, layout="Et|t|tmL", behind=1)


@each(GOLDEN["layout_parse"])
def test_layouts_parse_as_the_golden_ones(case: dict):
    if "error" in case:
        with pytest.raises(ConfigError, match="cannot read"):
            parse_layout(case["layout"])
    else:
        assert parse_layout(case["layout"]) == case["stages"]


def test_two_uneven_ranks_need_no_middle_ones():
    assert GOLDEN["upstream_crash"][0]["args"] == {
        "num_layers": 12,
        "pp": 2,
        "vpp": 2,
        "first": 4,
        "last": 8,
    }
    assert layers_of(plan_stages(12, 2, 2, first=4, last=8)) == [
        [[0, 1], [6, 7]],
        [[2, 3, 4, 5], [8, 9, 10, 11]],
    ]


def test_one_stage_holds_everything():
    assert plan_stages(3, 1).stages == ((Stage((0, 1, 2), embedding=True, head=True),),)


def test_a_layout_may_be_a_list_of_names():
    names = [["embedding", "decoder"], ["decoder"], ["decoder", "decoder"], ["loss"]]
    letters = plan_stages(4, 2, layout="Et|t|tt|L")
    assert (
        plan_stages(4, 2, layout=names) == letters == plan_stages(4, 2, vpp=2, layout="Et|t|tt|L")
    )
    with pytest.raises(ConfigError, match="foo: is no layer; layers are embedding"):
        plan_stages(1, 1, layout=[["embedding", "foo", "loss"]])


def test_a_v_goes_down_the_ranks_and_back_up():
    plan = plan_stages(8, 2, 2, v_shape=True)
    assert layers_of(plan) == [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    assert [[stage.embedding for stage in rank] for rank in plan.stages] == [
        [True, False],
        [False, False],
    ]
    assert [[stage.head for stage in rank] for rank in plan.stages] == [
        [False, True],
        [False, False],
    ]
    assert plan.pipeline == Pipeline(2, 2, v_shape=True) and plan_stages(
        8, 2, 2
    ).pipeline == Pipeline(2, 2)
    assert [stage.layers for stage in plan.in_order] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    uneven = [[[0], [13]], [[1, 2, 3], [10, 11, 12]], [[4, 5, 6], [7, 8, 9]]]
    assert layers_of(plan_stages(14, 3, 2, first=2, v_shape=True)) == uneven
    assert layers_of(plan_stages(6, 2, 2, count_embedding=True, count_head=True, v_shape=True)) == [
        [[0], [5]],
        [[1, 2], [3, 4]],
    ]
    assert layers_of(plan_stages(5, 2, layout="Ett|t|t|tL", v_shape=True)) == [
        [[0, 1], [4]],
        [[2], [3]],
    ]
    assert layers_of(plan_stages(2, 1, 2, v_shape=True)) == [[[0], [1]]]


def test_stages_may_be_empty():
    assert layers_of(plan_stages(4, 2, layout="Ett|tt||L")) == [[[0, 1], []], [[2, 3], []]]
    assert layers_of(plan_stages(4, 4, layout="Ett||tt|L")) == [[[0, 1]], [[]], [[2, 3]], [[]]]
    assert layers_of(plan_stages(4, 4, layout="E|tttt||L")) == [[[]], [[0, 1, 2, 3]], [[]], [[]]]


@pytest.mark.parametrize(
    "wrong", [{}, {"vpp": 3}, {"vpp": 4, "layout": "Et|tt|tt|tL"}, {"layout": "Ettt|tttL"}]
)
def test_a_v_has_two_stages_per_rank(wrong: dict):
    with pytest.raises(ConfigError, match=r"two per pipeline rank; .* 2\?$|make vpp=1, not vpp=2"):
        plan_stages(6, 2, **wrong, v_shape=True)


@each(product(range(1, 25), (1, 2, 3, 4), (1, 2, 3)))
def test_every_accepted_split_covers_each_layer_once(num_layers: int, pp: int, vpp: int):
    choices = [
        {"first": first, "last": last} for first, last in product((None, 1, 2, 6), (None, 2, 3, 12))
    ]
    choices += [
        {"count_embedding": embedding, "count_head": head}
        for embedding, head in product((False, True), repeat=2)
    ]
    for choice in choices:
        try:
            plan = plan_stages(num_layers, pp, vpp, **choice)
        except ConfigError:
            continue
        in_order = [plan.stages[rank][chunk] for chunk in range(vpp) for rank in range(pp)]
        assert [layer for stage in in_order for layer in stage.layers] == list(range(num_layers))
        assert [stage.embedding for stage in in_order] == [True] + [False] * (pp * vpp - 1)
        assert [stage.head for stage in in_order] == [False] * (pp * vpp - 1) + [True]
        for rank, key in ((0, "first"), (-1, "last")):
            assert choice.get(key) in (None, sum(len(stage.layers) for stage in plan.stages[rank]))


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (
            {"num_layers": 10, "pp": 4},
            [
                "pp × vpp = 4 × 1 = 4 stages",
                "mean parallel.first=2 parallel.last=2 or parallel.pp=2 or",
            ],
        ),
        (
            {"num_layers": 10, "pp": 4, "count_head": True},
            ["10 layers + 1 for embedding", "mean 7 or 11 or parallel.pp=1 or"],
        ),
        (
            {"num_layers": 8, "pp": 4, "vpp": 2, "first": 3},
            ["first=3", "multiple of vpp=2", "mean 2 or 4?"],
        ),
        ({"num_layers": 8, "pp": 2, "first": 0}, ["first=0", "mean 1 or 2?"]),
        (
            {"num_layers": 9, "pp": 4, "first": 2},
            ["leave 7 layers for 3 middle ranks", "mean parallel.last=3 or 8?"],
        ),
        (
            {"num_layers": 8, "pp": 2, "first": 3, "last": 4},
            ["leave 1 layers for 0 middle ranks", "mean parallel.first=4 or 7?"],
        ),
        ({"num_layers": 8, "pp": 3, "first": 6, "last": 6}, ["leave -4 layers for 1 middle ranks"]),
        (
            {"num_layers": 8, "pp": 1, "first": 4, "last": 4},
            ["last=4: first=4 is set too, but pp=1 is only one rank"],
        ),
        ({"num_layers": 8, "pp": 2, "last": 3, "count_head": True}, ["last=3: cannot be combined"]),
        ({"num_layers": 8, "pp": 0}, ["pp=0: must be at least 1"]),
        (
            {"num_layers": 2, "pp": 2, "layout": "Et|tL", "first": 1},
            ["first, last, count_embedding and count_head must be unset"],
        ),
        ({"num_layers": 2, "pp": 2, "layout": "Et|t|L"}, ["its 3 stages do not divide over pp=2"]),
        (
            {"num_layers": 2, "pp": 2, "layout": "E|t|t|L", "vpp": 3},
            ["make vpp=2, not vpp=3", "mean parallel.vpp=2?"],
        ),
        (
            {"num_layers": 2, "pp": 2, "layout": "tEt|L"},
            ["one E, before all layers", "mean Ett|L?"],
        ),
        (
            {"num_layers": 3, "pp": 2, "layout": "Et|tL"},
            ["has 2 t for model.num_layers=3", "mean model.num_layers=2?"],
        ),
        ({"num_layers": 2, "pp": 2, "layout": "E(tt)|L"}, ["cannot read '('"]),
        ({"num_layers": 4, "pp": 4, "layout": "E|tttt|L|"}, ["E in its first", "mean E|tttt||L?"]),
        ({"num_layers": 2, "pp": 3, "layout": "||EttL"}, ["L in its last one", "mean Ett||L?"]),
        ({"num_layers": 2, "pp": 2, "layout": "EttL|"}, ["L in its last one", "mean Ett|L?"]),
    ],
)
def test_refusals_name_the_numbers_and_the_nearest_that_works(args: dict, parts: list[str]):
    with pytest.raises(ConfigError) as refusal:
        plan_stages(**args)
    assert all(part in str(refusal.value) for part in parts)


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp"),
    [(61, 16, 1), (61, 8, 2), (32, 3, 1), (7, 3, 1), (33, 8, 1), (62, 8, 2), (5, 4, 1), (27, 4, 3)],
)
def test_uneven_layers_are_split_by_the_first_offer(num_layers: int, pp: int, vpp: int):
    """No rank has more than one layer over what the mean rounds up to, per stage."""
    with pytest.raises(ConfigError) as refused:
        plan_stages(num_layers, pp, vpp)
    offers = refused.value.alternatives[0].candidates
    for offer in offers:
        assert isinstance(offer, Instead)
        words = dict(word.removeprefix("parallel.").split("=") for word in offer.overrides)
        chosen = {
            key: value.strip("'") if key == "layout" else int(value) for key, value in words.items()
        }
        plan = plan_stages(num_layers, pp, vpp, **chosen)
        sizes = [sum(len(stage.layers) for stage in chunks) for chunks in plan.stages]
        assert sum(sizes) == num_layers
        if offer is offers[0]:
            assert max(sizes) <= -(-num_layers // pp) + vpp
