"""The model's descriptions of its weights: those of the real modules, for every preset and in every
kind of layout; what follows from them, by rules written once more here; and the one place where
names of weights stand.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.choices import NormKind
from app.config import MLAConfig, ModelConfig
from app.engine.build import build_layer, parameter_specs
from app.model.chunk import Chunk
from app.model.layers.layer_groups import LayerGroups
from app.model.layers.linear import ColumnParallelLinear, named_parameters
from app.moe.dispatch.local import LocalDispatcher
from app.plan.layout import ParallelLayout
from app.plan.model.attention import attention_weights
from app.plan.model.stage import model_weights
from app.plan.model.weight import Initial
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.parameters import chunk_parameters
from app.plan.sharding.reshard import Block
from app.plan.stages import Stage, plan_stages
from tests.training import ROOT, composed

SIZELESS = "pretrained"  # has the sizes of the model that it is given
PRESETS = sorted({path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")} - {SIZELESS})
PRESETS += ["dense_tiny+qkv_bias+mlp_bias", "dense_tiny+qk_norm+qk_norm_whole"]
LAYOUTS = {
    "one rank": ParallelLayout(1),
    "tp": ParallelLayout(2, tp=2, etp=1),
    "tp and parts of experts": ParallelLayout(2, tp=2, etp=2),
    "ep": ParallelLayout(4, ep=4, etp=1),
    "all": ParallelLayout(8, tp=2, ep=2, etp=2, pp=2),
}
DEEP = 4  # layers: both kinds, of every preset


@cache
def preset_model(preset: str) -> ModelConfig:
    """A preset, and keys that are on, cut to so many layers that it has both kinds of its own."""
    name, *keys = preset.split("+")
    words = [f"model={name}", *(f"model.{key}=true" for key in keys)]
    model = composed(words, 1).model
    # some vocabularies have an odd number of rows, which tp=2 refuses
    rows = model.vocab_size + model.vocab_size % 2
    types = model.layer_types[:DEEP]
    return dataclasses.replace(model, num_layers=DEEP, layer_types=types, vocab_size=rows)


def peers_of(layout: ParallelLayout, rank: int) -> LayerGroups:
    place = ShardCoords.of(layout, rank)
    index, ranks = place.tp
    tp: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: index)
    (ep_rank, ep), (etp_rank, etp) = place.ep, place.etp
    return LayerGroups(tp=tp, etp_ep=tp, ep=ep, ep_rank=ep_rank, etp=etp, etp_rank=etp_rank)


def meta_chunk(model: ModelConfig, stage: Stage, layer_groups: LayerGroups) -> Chunk:
    """A stage without memory."""
    with torch.device("meta"):
        layers = {
            index: build_layer(model, index, layer_groups, dispatcher=LocalDispatcher(8))
            for index in stage.layers
        }
        return Chunk(model, layers, stage.embedding, head=stage.head, layer_groups=layer_groups)


def up_block(shape: tuple[int, ...], parts: int, index: int, *, gate: bool) -> Block:
    """The block of an up projection or its bias, which with a gate are two parts."""
    rows, *columns = shape
    if gate:
        return Block.whole(2, rows // 2 * parts, *columns).cut(1, parts, index)
    return Block.whole(rows * parts, *columns).cut(0, parts, index)


def block_by_name(
    name: str, shape: tuple[int, ...], place: ShardCoords, *, gate: bool = True
) -> Block:
    """The block of which a rank's parameter has this shape, by the name's last part."""
    leaf, (index, parts) = name.rsplit(".", 1)[-1], place.tp
    if ".experts." in name:
        (share, ep), (part, etp) = place.ep, place.etp
        if leaf == "b_up":
            whole = Block.whole(shape[0] * ep, 2, shape[1] // 2 * etp)
            return whole.cut(0, ep, share).cut(2, etp, part)
        if leaf == "b_down":
            whole = Block.whole(shape[0] * ep, shape[1] * etp)
            return whole.cut(0, ep, share).cut(1, etp, part)
        experts, rows, columns = shape
        if leaf == "w_up":
            whole = Block.whole(experts * ep, rows, 2, columns // 2 * etp)
            return whole.cut(0, ep, share).cut(3, etp, part)
        whole = Block.whole(experts * ep, rows * etp, columns)
        return whole.cut(0, ep, share).cut(1, etp, part)
    if leaf in ("b_up", "w_up"):
        return up_block(shape, parts, index, gate=gate)
    if leaf in ("bqkv", "sinks", "a_log", "dt_bias"):
        return Block.whole(shape[0] * parts).cut(0, parts, index)
    if leaf in ("wqkv", "q_b", "kv_b", "embedding", "head", "conv", "w_in", "w_beta"):
        return Block.whole(shape[0] * parts, shape[1]).cut(0, parts, index)
    if leaf in ("wo", "w_down", "w_out"):
        return Block.whole(shape[0], shape[1] * parts).cut(1, parts, index)
    return Block.whole(*shape)


def whole_by_name(name: str) -> bool:
    """Return whether all tensor-parallel ranks hold the weight whole, by its name's last part."""
    cut = ("wqkv", "q_b", "kv_b", "embedding", "head", "wo", "w_down", "w_up")
    cut += ("conv", "w_in", "w_beta", "w_out")
    biases = ("bqkv", "sinks", "b_up", "a_log", "dt_bias")
    return ".experts." not in name and name.rsplit(".", 1)[-1] not in cut + biases


PLUS_ONE = (NormKind.rms_plus_one, NormKind.layer_plus_one)
BIASES = ("bqkv", "bo", "bias", "b_up", "b_down")
OF_DELTA_RULE = {
    "a_log": Initial.log_uniform,
    "dt_bias": Initial.ones,
    "conv": Initial.kaiming,
}


def initial_by_name(name: str, dims: int, model: ModelConfig) -> Initial:
    leaf = name.rsplit(".", 1)[-1]
    if leaf in BIASES:
        return Initial.zeros
    if leaf in OF_DELTA_RULE:
        return OF_DELTA_RULE[leaf]
    if dims == 1 and leaf != "sinks":
        of_heads = name.endswith(".attn.norm.weight")  # of linear attention
        plus_one = model.norm in PLUS_ONE and not of_heads
        return Initial.zeros if plus_one else Initial.ones
    return Initial.residual if leaf in ("wo", "w_down", "w_out") else Initial.normal


@pytest.mark.every(12)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_modules_plan_and_blocks_match_the_weight_records(preset: str, layout: ParallelLayout):
    ends = (0, layout.world_size - 1)
    stages = [stage for (stage,) in plan_stages(DEEP, layout.pp).stages]
    for tied in (False, True):
        model = dataclasses.replace(preset_model(preset), tie_embeddings=tied)
        kinds = {each.name: each.weight.initial for each in model_weights(model)}
        for stage in stages:
            planned = chunk_parameters(model, stage, layout)
            for rank in ends:
                chunk = meta_chunk(model, stage, peers_of(layout, rank))
                assert [(name, tuple(param.shape)) for name, param in named_parameters(chunk)] == [
                    (parameter.name, parameter.shape) for parameter in planned
                ]
                place = ShardCoords.of(layout, rank)
                for spec, parameter in zip(parameter_specs(chunk, place), planned, strict=True):
                    shape, whole = tuple(spec.param.shape), whole_by_name(spec.name)
                    name = spec.name
                    if model.qk_norm_whole and re.search(r"\.[qk]_norm\.", name):
                        name, whole = "bqkv", False  # cut as that is
                    copy = spec.name == "embedding" and parameter.tied
                    assert spec.block == block_by_name(
                        f"attn.{name}", shape, place, gate=model.mlp_gate
                    )
                    assert spec.expert == parameter.expert == (".experts." in spec.name)
                    biased = name.rsplit(".", 1)[-1] in BIASES
                    assert spec.decay == (len(shape) > 1 and not biased)
                    assert spec.replicated == (whole and layout.tp > 1)
                    assert spec.tied == copy
                    assert copy == (
                        spec.name == "embedding"
                        and model.tie_embeddings
                        and stage.embedding != stage.head
                    )
                    repeated = spec.replicated and place.tp[0] > 0
                    assert spec.counted == (not repeated and (not copy or stage.embedding))
                    assert kinds[spec.name] is initial_by_name(spec.name, len(shape), model)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("preset", ["moe_tiny", "deepseek_v2_lite", "deepseek_v3_like"])
def test_blocks_of_all_ranks_are_the_whole(preset: str, layout: ParallelLayout):
    places = {ShardCoords.of(layout, rank) for rank in range(layout.world_size)}
    for each in model_weights(preset_model(preset)):
        blocks = {place.block(each.weight) for place in places}
        assert sum(block.numel for block in blocks) == each.weight.numel
        for place in places:
            assert math.prod(place.shape(each.weight)) == place.block(each.weight).numel


def test_weights_may_be_whole_between_divided_ones():
    model = ModelConfig(
        hidden_size=32,
        num_heads=4,
        num_kv_heads=4,
        mla=MLAConfig(24, 16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6),
    )
    weights = dict(attention_weights(model.layer_specs[0].attention).weights("attn."))
    place = ShardCoords(tp=(1, 2))
    assert {name.partition(".")[2]: place.shape(weight) for name, weight in weights.items()} == {
        "q_a": (24, 32),
        "q_a_norm.weight": (24,),
        "q_b": (24, 24),
        "kv_a": (20, 32),
        "kv_a_norm.weight": (16,),
        "kv_b": (28, 16),
        "wo": (32, 12),
    }
    replicas = {name for name, weight in weights.items() if weight.replicated}
    assert replicas == {
        "attn.q_a",
        "attn.q_a_norm.weight",
        "attn.kv_a",
        "attn.kv_a_norm.weight",
    }
    # a GEMM with a whole weight is of a rank's own tokens: nothing is gathered in front of it
    two = peers_of(LAYOUTS["tp"], 1)
    own, gathers = (ColumnParallelLinear(weights[f"attn.{name}"], two) for name in ("q_a", "q_b"))
    assert own.group is None and gathers.group is two.tp


SOURCES = sorted((ROOT / "app").rglob("*.py"))
# readers of train.frozen, which lists names of weights
NAMED_BY_USERS = (
    "app/engine/build.py",
    "app/model/layers/frozen.py",
    "app/plan/cost/volumes.py",
    "app/plan/memory/activations.py",
    "app/plan/sharding/frozen.py",
    "app/rules/frozen.py",
)
# words that are names of weights, and elsewhere mean a thing of their own
OTHER_WORDS = {
    "embedding": {  # groups, layouts, phases
        "app/plan/groups.py",
        "app/plan/stages.py",
        "app/cli/plan_views/tables.py",
        "app/plan/parts/stage.py",
        *NAMED_BY_USERS,
    },
    **{name: set(NAMED_BY_USERS) for name in ("layers.", "wqkv", "w_up", "w_down")},
    "weight": {  # of a source of data, of an answer; of torch's modules
        "app/config/sources.py",
        "app/data/messages.py",
        "app/model/lora.py",
        "app/engine/files/manifest.py",
        "app/engine/start/resume.py",
        *NAMED_BY_USERS,
    },
    # also those that run in FP8
    "head": {
        "app/cli/plan_views/tables.py",
        "app/plan/parts/stage.py",
        "app/choices.py",
        "app/plan/sharding/frozen.py",
        "app/rules/frozen.py",
    },
    "shared_gate": {
        "app/config/experts.py",
        "app/hf/families.py",
        "app/hf/qwen_moe.py",
    },  # a key of the configuration
}


@cache
def weight_names() -> tuple[set[str], set[str]]:
    """Last parts of weights' names, and all parts of them but numbers."""
    names = ("moe_tiny", "dense_tiny", "qwen3_next_80b_a3b", "deepseek_v3_like")
    models = [preset_model(name) for name in names]
    moe = models[0].moe
    assert moe is not None
    gated = dataclasses.replace(moe, shared_ffn_hidden_size=32, shared_gate=True)
    models.append(dataclasses.replace(models[0], moe=gated, qkv_bias=True))
    paths = [each.name.split(".") for model in models for each in model_weights(model)]
    leaves = {path[-1] for path in paths}
    return leaves, {part for path in paths for part in path if not part.isdigit()}


def names_in(source: str) -> Iterator[str]:
    """Names of weights among the strings of a module: a leaf by itself, or a path with a part of
    one, which is no key of the configuration.
    """
    leaves, parts = weight_names()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        text = node.value
        if text in leaves:
            yield text
        elif re.fullmatch(r"\w*(\.\w*)+", text) and not text.startswith("model."):
            yield from {text} if parts & set(text.split(".")) else ()


FILES_OF_THEIR_NAMES = "tables", "adapter_names", "behind", "qwen3_next"


def test_names_of_weights_are_written_nowhere_else():
    def elsewhere(path: Path) -> list[str]:
        found, place = names_in(path.read_text()), path.relative_to(ROOT).as_posix()
        return [name for name in found if place not in OTHER_WORDS.get(name, ())]

    inside = ROOT / "app" / "plan" / "model"
    # what others call them
    theirs = {ROOT / f"app/hf/{name}.py" for name in FILES_OF_THEIR_NAMES}
    outside = [path for path in SOURCES if inside not in path.parents and path not in theirs]
    assert len(outside) > 150
    found = {str(path.relative_to(ROOT)): elsewhere(path) for path in outside}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_rule_on_names_can_fail():
    source = 'ROWS = ("wqkv", "rows")\ninside = ".experts." in name\nkey = "model.moe.shared_gate"'
    assert list(names_in(source)) == ["wqkv", ".experts."]
    leaves, parts = weight_names()
    assert leaves == {
        *("embedding", "wqkv", "wo", "weight", "w_up", "w_down", "shared_gate", "head"),
        *("q_a", "q_b", "kv_a", "kv_b", "bqkv"),
        *("a_log", "dt_bias", "conv", "w_in", "w_beta", "w_out"),
    }
    assert parts >= {"experts", "router", "q_norm", "attn"}
