"""Matrices inside a rank's part of a weight, and their owners."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest
import torch
from torch import Tensor

from app.config import MLAConfig, ModelConfig, MoEConfig
from app.plan.model.stage import model_weights
from app.plan.model.weight import Weight
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.matrices import Stack, pieces, placed

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=8,
    ffn_hidden_size=12,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=16,
    qkv_bias=True,
    moe=MoEConfig(
        num_experts=4, top_k=2, ffn_hidden_size=6, shared_ffn_hidden_size=4, shared_gate=True
    ),
)
LATENT = dataclasses.replace(
    MODEL, num_kv_heads=4, qkv_bias=False, moe=None, mla=MLAConfig(6, 8, 2, 2, v_head_dim=4)
)
WEIGHTS = {
    f"{kind}.{named.name.partition('.1.')[2] or named.name}": named.weight
    for kind, model in (("grouped", MODEL), ("latent", LATENT))
    for named in model_weights(model)
}


def by_hand(name: str, whole: Tensor) -> list[Tensor]:
    """The matrices of a whole weight, by its name."""
    leaf = name.rsplit(".", 1)[-1]
    if name.endswith("experts.w_up"):  # expert, in, gate or up, out
        return [each for expert in whole for each in expert.unbind(1)]
    if name.endswith("experts.w_down") or leaf == "w_up":
        return [*whole]
    heads = {
        "wqkv": (2, [(0, 4), (4, 6), (6, 8)]),  # 2 query heads, key, value, 2 wide each
        "q_b": (4, [(0, 2), (2, 4)]),
        "kv_a": (1, [(0, 8), (8, 10)]),
        "kv_b": (4, [(0, 2), (2, 6)]),
    }
    if leaf in heads:
        groups, rows = heads[leaf]
        grouped = whole.unflatten(0, (groups, -1))
        return [grouped[:, start:stop].flatten(0, 1) for start, stop in rows]
    return [whole]


def ranks_of(ranks: int) -> list[ShardCoords]:
    return [ShardCoords(tp=(rank, ranks), etp=(rank, ranks)) for rank in range(ranks)]


def parts_on(weight: Weight, ranks: int, most: int) -> list[list[Tensor]]:
    """Per rank: its parts of all matrices, in order, as strided views of its own tensor."""
    whole = torch.arange(weight.numel).view(weight.shape)
    found = []
    for coords in ranks_of(ranks):
        block = coords.block(weight)
        flat = whole[tuple(map(slice, block.start, block.stop))].flatten()
        end = 0
        matrices: list[list[Tensor]] = []
        for piece in pieces(weight, block.sizes, most):
            assert piece.bounds[0] == end, "pieces are neighbours"
            end = piece.bounds[1]
            inside = flat[slice(*piece.bounds)]
            stacks = [inside[s.offset :].as_strided(s.sizes, s.strides) for s in piece.stacks]
            matrices += [[each.flatten(0, 1) for each in stack.flatten(0, 1)] for stack in stacks]
        assert end == flat.numel()
        found.append([each for stack in matrices for each in stack])
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("most", [1, 3, 8])
def test_pieces_hold_the_matrices_of_all_weights(ranks: int, most: int):
    for name, weight in WEIGHTS.items():
        if not weight.linear:
            continue
        divided = {
            stack.divided
            for piece in pieces(weight, ShardCoords().block(weight).sizes, most)
            for stack in piece.stacks
        }
        (dim,) = divided
        parts = parts_on(weight, ranks, most)
        whole = torch.arange(weight.numel).view(weight.shape)
        joined = [
            each[0] if dim is None else torch.cat(each, dim)
            for each in map(list, zip(*parts, strict=True))
        ]
        wanted = by_hand(name, whole)
        assert [each.tolist() for each in joined] == [each.tolist() for each in wanted], name


def test_matrices_of_linear_layers_and_experts_only():
    others = {name.rsplit("layers.0.", 1)[-1] for name, each in WEIGHTS.items() if not each.linear}
    assert {name for name in others if "norm" not in name} == {
        "grouped.embedding", "grouped.head", "latent.embedding", "latent.head",
        "attn.bqkv", "body.router.weight", "body.shared_gate",
    }  # fmt: skip
    assert all(each.decay and len(each.shape) > 1 for each in WEIGHTS.values() if each.linear)


def test_owners_have_balanced_costs():
    weights = [(each, ShardCoords().block(each).sizes) for each in WEIGHTS.values() if each.linear]

    def cost(stack: Stack) -> float:
        return stack.count * prod(stack.shape())

    for ranks in (1, 2, 3, 8):
        found, loads = placed(weights, ranks, cost)
        assert sum(loads) == sum(weight.numel for weight, _ in weights)
        assert loads == [
            sum(each.piece.numel for each in found if each.owner == rank) for rank in range(ranks)
        ]
        largest = max(each.piece.numel for each in found)
        assert max(loads) <= sum(loads) / ranks + largest
