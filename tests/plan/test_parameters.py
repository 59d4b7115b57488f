"""Parameters of a rank: those of the real modules, their parts under every kind of parallelism,
and their buffers.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from math import lcm, prod

import pytest

from app.config import ModelConfig, MoEConfig, OptimConfig
from app.engine.build import parameter_specs
from app.plan.cost.flops import parameter_count
from app.plan.layout import ParallelLayout
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.parameters import ALIGN, Parameter, chunk_buffers, chunk_parameters
from app.plan.stages import Stage, plan_stages
from tests.tensors.models import make_chunks

DENSE = ModelConfig(
    num_layers=4, hidden_size=64, ffn_hidden_size=96, num_heads=8, num_kv_heads=4, vocab_size=96
)
MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=48,
    shared_ffn_hidden_size=32,
    shared_gate=True,
    first_k_dense=1,
)
MODELS = {
    "dense": DENSE,
    "tied": dataclasses.replace(DENSE, tie_embeddings=True),
    "moe": dataclasses.replace(DENSE, moe=MOE, qk_norm=True),
    "plain_moe": dataclasses.replace(
        DENSE, moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=32), head_dim=16
    ),
}
ONE = ParallelLayout(1)


def whole(model: ModelConfig, layout: ParallelLayout = ONE) -> dict[str, Parameter]:
    stage = Stage(tuple(range(model.num_layers)), embedding=True, head=True)
    return {parameter.name: parameter for parameter in chunk_parameters(model, stage, layout)}


@pytest.mark.parametrize(
    ("name", "ep", "vpp"), [*product(MODELS, [1], [1, 2]), ("moe", 2, 1), ("plain_moe", 4, 1)]
)
def test_names_shapes_and_order_are_the_engines(name: str, ep: int, vpp: int):
    model = MODELS[name]
    layout = ParallelLayout(ep, ep=ep, etp=1)
    chunks = make_chunks(model, ep=ep, vpp=vpp)
    for chunk, stage in zip(chunks, plan_stages(model.num_layers, 1, vpp).stages[0], strict=True):
        engine = [
            Parameter(spec.name, tuple(spec.param.shape), expert=spec.expert, tied=spec.tied)
            for spec in parameter_specs(chunk, ShardCoords())
        ]
        assert list(chunk_parameters(model, stage, layout)) == engine


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_rank_has_all_parameters_of_the_model(model: ModelConfig):
    parameters = whole(model).values()
    assert sum(parameter.numel for parameter in parameters) == parameter_count(model).total
    assert (
        sum(parameter.numel for parameter in parameters if parameter.expert)
        == parameter_count(model).experts
    )


def test_tp_divides_matrices_and_replicates_the_rest():
    model, tp = MODELS["moe"], 4
    one, part = whole(model), whole(model, ParallelLayout(4, tp=tp))
    assert list(one) == list(part)
    rows = {"embedding", "head", "wqkv"}
    for name, parameter in part.items():
        shape, leaf = list(one[name].shape), name.rsplit(".", 1)[-1]
        if parameter.expert:
            shape[2 if leaf == "w_up" else 1] //= tp
        elif leaf in rows or leaf == "w_up":
            shape[0] //= tp
        elif leaf in ("wo", "w_down"):
            shape[1] //= tp
        assert parameter.shape == tuple(shape)
    repeated = [name for name in one if one[name] == part[name]]
    assert {name.split(".", 2)[-1] if name.startswith("layers") else name for name in repeated} == {
        "attn_norm.weight",
        "attn.q_norm.weight",
        "attn.k_norm.weight",
        "body.norm.weight",
        "body.router.weight",
        "body.shared_gate",
        "norm.weight",
    }


def test_expert_grid_is_independent_of_tensor_parallelism():
    model = MODELS["moe"]
    part = whole(model, ParallelLayout(8, tp=4, ep=4, etp=2))
    assert part["layers.1.body.experts.w_up"].shape == (2, 64, 2 * 24)
    assert part["layers.1.body.experts.w_down"].shape == (2, 24, 64)
    assert part["layers.1.body.shared.w_up"].shape == (2 * 8, 64)
    assert part["layers.0.body.mlp.w_down"].shape == (64, 24)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2)])
def test_stages_hold_parameters_once_and_tied_embeddings_twice(
    model: ModelConfig, pp: int, vpp: int
):
    stages = [stage for rank in plan_stages(model.num_layers, pp, vpp).stages for stage in rank]
    held = [
        parameter
        for stage in stages
        for parameter in chunk_parameters(model, stage, ParallelLayout(pp, pp=pp))
    ]
    untied = {parameter.name: dataclasses.replace(parameter, tied=False) for parameter in held}
    assert untied == whole(model)
    tied = [parameter.name for parameter in held if parameter.tied]
    assert tied == ["embedding"] * 2 * model.tie_embeddings
    assert len(held) - len(whole(model)) == model.tie_embeddings
    assert sum(parameter.name == "embedding" for parameter in held) == 1 + model.tie_embeddings


def test_buffers_are_sharded_over_ranks_with_equal_parameters():
    model, layout = MODELS["moe"], ParallelLayout(16, tp=2, cp=2, ep=4, etp=1)
    parameters = tuple(whole(model, layout).values())
    buffers = chunk_buffers(parameters, layout, OptimConfig())
    assert buffers.dense is not None and buffers.expert is not None
    assert (buffers.dense.world, buffers.expert.world) == (4 * 2, 4)
    for buffer, expert in ((buffers.dense, False), (buffers.expert, True)):
        sizes = [prod(parameter.shape) for parameter in parameters if parameter.expert == expert]
        assert [end - start for start, end in buffer.params] == sizes
        assert (
            all(start % ALIGN == 0 for start, _ in buffer.params)
            and buffer.numel % lcm(ALIGN, buffer.world) == 0
        )
        assert 0 <= buffer.numel - sum(sizes) < ALIGN * (len(sizes) + buffer.world)


def test_a_chunk_without_experts_has_one_buffer():
    buffers = chunk_buffers(tuple(whole(DENSE).values()), ONE, OptimConfig())
    assert buffers.expert is None and buffers.dense is not None
    empty = chunk_buffers((), ONE, OptimConfig())
    assert (empty.dense, empty.expert) == (None, None)
