"""Memory for keys and values by hand, and the nearest batch that fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import Dtype, LayerType
from app.config import DynamicRopeConfig, HardwareConfig, ParallelConfig, PrecisionConfig, Run
from app.errors import ConfigError
from app.plan.memory.overheads import CUDA_CONTEXT, WORKSPACES
from app.planner.decoding import (
    DecodingSizes,
    check_decoding_length,
    check_decoding_memory,
    decoding_memory,
)
from app.planner.export import Decoding
from app.planner.plan import Plan
from tests.runs import LATENT, TINY, make_run

DENSE = dataclasses.replace(TINY, moe=None, num_layers=4)
BF16 = PrecisionConfig(Dtype.bfloat16)


def plan_of(model: Any = DENSE, precision: PrecisionConfig = BF16, **parallel: int) -> Plan:
    return Plan(make_run(model, parallel=ParallelConfig(**parallel), precision=precision))


def test_grouped_query_attention_by_hand():
    layer = 3 * 10 * 2 * 2 * 8 * 2  # texts, tokens, keys and values, heads, width, bytes
    memory = decoding_memory(plan_of(), 0, 3, tokens=10)
    assert (memory.caches, memory.keys_values) == ((layer,) * 4, 4 * layer)
    cut = decoding_memory(plan_of(tp=2, pp=2), 1, 3, tokens=9)
    assert cut.caches == (layer // 2,) * 2, "9 tokens are filled up to 10"
    assert decoding_memory(plan_of(cp=2), 0, 3, tokens=10) == memory


def test_latent_attention_by_hand():
    layer = 3 * 10 * (16 + 4) * 4
    for degrees in ({}, {"tp": 2}):
        plan = plan_of(LATENT, PrecisionConfig(), **degrees)
        assert decoding_memory(plan, 0, 3, tokens=10).caches[0] == layer


def test_a_window_bounds_what_its_layers_cache():
    types = (LayerType.sliding_attention, LayerType.full_attention)
    plan = plan_of(dataclasses.replace(DENSE, sliding_window=6, layer_types=types))
    token = 3 * 2 * 2 * 8 * 2  # texts, keys and values, heads, width, bytes
    assert decoding_memory(plan, 0, 3, tokens=10).caches == (6 * token, 10 * token) * 2
    assert decoding_memory(plan, 0, 3, tokens=5).caches == (5 * token,) * 4


def test_the_table_of_a_plan_by_hand():
    """Two pipeline ranks with a layout that pads texts, and a GPU too small for one text."""
    plan = plan_of(tp=2, pp=2, dp=2)
    context = plan.run.train.seq_len
    token = 2 * 2 * 1 * 8 * 2  # layers of a rank, keys and values, heads, width, bytes
    found = Decoding.of(plan)
    assert [(row.pp_rank, row.layers, row.token) for row in found.rows] == [
        (0, 2, token),
        (1, 2, token),
    ]
    assert {row.text for row in found.rows} == {context * token}
    assert (found.context, found.replicas) == (context, 2)
    heaviest = max(row.weights for row in found.rows)
    room = plan.gpu_memory - CUDA_CONTEXT - WORKSPACES - heaviest
    assert found.together == room // (context * token)
    gib = (CUDA_CONTEXT + WORKSPACES + heaviest + context * token - 1) / 2**30
    small = HardwareConfig(gpu_memory_gib=gib)
    assert Decoding.of(Plan(dataclasses.replace(plan.run, hardware=small))).together == 0


def refused(plan: Plan, sizes: DecodingSizes, have: int, gpu: bool = False) -> ConfigError:
    with pytest.raises(ConfigError) as found:
        check_decoding_memory(plan, sizes, have, gpu=gpu)
    return found.value


@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("gpu", [False, True])
def test_the_nearest_that_fits_does_and_one_more_does_not(degrees: dict[str, int], gpu: bool):
    plan = plan_of(**degrees)
    sizes = DecodingSizes(sequences=9, prompt=5, new=8)
    one = decoding_memory(plan, 0, 1, tokens=sizes.tokens)
    fixed = CUDA_CONTEXT + WORKSPACES if gpu else 0
    heaviest = max(
        decoding_memory(plan, rank, 0, tokens=0).weights for rank in range(plan.layout.pp)
    )
    have = fixed + heaviest + 4 * one.keys_values + one.caches[0]
    error = refused(plan, sizes, have, gpu)
    assert (error.key, error.value, error.nearest) == ("batch", 9, 4)
    check_decoding_memory(plan, dataclasses.replace(sizes, sequences=4), have, gpu=gpu)
    refused(plan, dataclasses.replace(sizes, sequences=5), have, gpu)
    # of one text: fewer tokens
    longer = DecodingSizes(sequences=1, prompt=5, new=100)
    error = refused(plan, longer, have, gpu)
    assert error.key == "max_new_tokens" and isinstance(error.nearest, int)
    check_decoding_memory(plan, dataclasses.replace(longer, new=error.nearest), have, gpu=gpu)
    more = dataclasses.replace(longer, new=error.nearest + plan.run.parallel.tp)
    refused(plan, more, have, gpu)


def test_weights_that_do_not_fit_have_no_nearest_batch():
    error = refused(plan_of(), DecodingSizes(2, 3, 4), 1000, gpu=True)
    assert (error.key, error.nearest) == ("batch", None)
    assert error.advice == "parallel.pp spreads it over more GPUs"


def test_the_message_says_what_takes_memory():
    run: Run = make_run(DENSE, precision=BF16)
    error = refused(Plan(run), DecodingSizes(8, 5, 59), 100_000)
    assert "keys and values of 8 texts of 64 tokens take 131.07 kB per rank beside" in str(error)


def test_texts_longer_than_positions_allow_are_refused():
    model = dataclasses.replace(TINY, dynamic_rope=DynamicRopeConfig(2.0, 100))
    check_decoding_length(model, DecodingSizes(1, 60, 40))
    check_decoding_length(TINY, DecodingSizes(1, 60, 4000))
    with pytest.raises(ConfigError) as refused:
        check_decoding_length(model, DecodingSizes(1, 60, 41))
    assert str(refused.value) == (
        "max_new_tokens=41: a text of 101 tokens, with its prompt, has other rotary positions than "
        "one of model.dynamic_rope.original_length=100, and keys of its first tokens are cached; "
        "did you mean 40?"
    )
    with pytest.raises(ConfigError, match="a text of 101 tokens"):
        check_decoding_length(model, DecodingSizes(1, 100, 1))
