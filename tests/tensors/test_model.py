"""Properties of every model: causality, separate documents, relative positions, initial weights,
phases.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from app.choices import Dtype, Score
from app.config import ModelConfig, MoEConfig
from app.config.attention import Rope
from app.model.block import Layer, Phase, run_phases
from app.model.init import init_weights
from app.model.layers.attend import DocumentOffsets, visible
from app.model.layers.layers import RotaryTable, layer_context, rotate
from app.model.layers.linear import named_parameters
from app.moe.dispatch.all_to_all import AllToAllDispatcher
from app.moe.phases import MoEBody
from app.plan.model.stage import model_weights
from app.plan.phases import PhaseName
from app.plan.sharding.blocks import ShardCoords
from tests.rounding import expect_alike, expect_sums, in_fp64, numbered, plain_and_exact
from tests.runs import TINY
from tests.tensors.models import draw_tokens, forward, make_chunk, make_chunks, mean_loss

MOE = MoEConfig(num_experts=8, top_k=3, ffn_hidden_size=16, z_loss_coeff=0.001)
SHARED = dataclasses.replace(
    MOE,
    shared_ffn_hidden_size=16,
    shared_gate=True,
    score=Score.sigmoid,
    groups=4,
    topk_groups=2,
    routed_scale=2.0,
)
# weights large enough that logits are of order 1 and depend on everything
LOUD = dataclasses.replace(TINY, init_std=0.4)
MODELS = {
    "dense": dataclasses.replace(LOUD, moe=None),
    "dense-tied-qk-norm": dataclasses.replace(LOUD, moe=None, tie_embeddings=True, qk_norm=True),
    "moe": dataclasses.replace(LOUD, moe=MOE),
    "moe-shared-mixed": dataclasses.replace(LOUD, moe=dataclasses.replace(SHARED, first_k_dense=1)),
}
LENGTH = 24
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def positions_within(documents_BS: Tensor) -> Tensor:
    """Positions that restart with every document."""
    restart = torch.ones_like(documents_BS, dtype=torch.bool)
    restart[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    index = torch.arange(documents_BS.shape[1]).expand_as(documents_BS)
    return index - torch.where(restart, index, 0).cummax(dim=1).values


# of the documents of two sequences
LENGTHS = ((5, 1, 11, 7), (12, 1, 1, 10))


def draw_documents() -> tuple[Tensor, Tensor]:
    """Documents of two sequences, of each token and their ends; some have one token, and borders
    differ between the sequences.
    """
    owners = [torch.arange(4).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    ends_BD = torch.tensor(LENGTHS).cumsum(1)
    padded = torch.cat((ends_BD, torch.full((2, 3), LENGTH)), dim=1)
    return torch.stack(owners), padded.int()


@each_model
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@torch.no_grad()
def test_a_token_changes_nothing_before_it(model: ModelConfig, masked: bool):
    chunk, tokens = make_chunk(model), draw_tokens(model, 2, LENGTH)
    documents, ends = draw_documents() if masked else (None, None)
    positions = positions_within(documents) if masked else None
    plain, exact = plain_and_exact(
        lambda chunk: [forward(chunk, tokens, positions, ends_BD=ends).x], chunk
    )
    before = plain["0"]
    for changed in (1, 9, LENGTH - 1):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % model.vocab_size
        after = forward(chunk, other, positions, ends_BD=ends).x
        # An expert's GEMM has as many rows as tokens chose it, so its rounding may change.
        if model.moe:
            expect_alike(
                *({"x": values["0"][:, :changed]} for values in ({"0": after}, plain, exact))
            )
        else:
            assert torch.equal(after[:, :changed], before[:, :changed])
        assert ((after - before)[:, changed].abs().amax(dim=-1) > 1e-2).all()


@each_model
@torch.no_grad()
def test_document_mask_equals_documents_apart(model: ModelConfig):
    chunk, tokens = make_chunk(model), draw_tokens(model, 2, LENGTH)
    documents, ends = draw_documents()
    positions = positions_within(documents)
    plain, exact = plain_and_exact(
        lambda chunk: forward(chunk, tokens, positions, ends_BD=ends).x, chunk
    )
    apart = [
        [forward(chunk, tokens[row : row + 1, owner == n]).x[0] for n in owner.unique()]
        for row, owner in enumerate(documents)
    ]
    expect_alike(numbered(map(torch.cat, apart)), plain, exact)
    assert not torch.allclose(
        torch.stack(tuple(plain.values())), forward(chunk, tokens).x, atol=0.1
    )


@each_model
def test_losses_and_gradients_are_those_of_documents_one_by_one(model: ModelConfig):
    """In fp64; the router's losses, which are over a microbatch, are left out."""
    tokens, (documents, ends) = draw_tokens(model, 2, LENGTH), draw_documents()
    labels = draw_tokens(model, 2, LENGTH, seed=1)

    def summed(rows: Tensor, wanted: Tensor, places: Tensor, ends: Tensor | None = None) -> Tensor:
        context = chunk.context(places, ends)
        return chunk.loss(chunk(rows, context).x, wanted, context)

    with in_fp64():
        chunk = make_chunk(model).double()
        together = summed(tokens, labels, positions_within(documents), ends)
        parts = [
            (row[None, owner == n], wanted[None, owner == n])
            for row, wanted, owner in zip(tokens, labels, documents, strict=True)
            for n in owner.unique()
        ]
        alone = sum(summed(*each, torch.arange(each[0].shape[1])[None]) for each in parts)
        params = list(chunk.parameters())
        grads = [torch.autograd.grad(loss, params) for loss in (together, alone)]
    assert together.dtype == torch.float64
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("window", [None, 1, 4, LENGTH])
@pytest.mark.parametrize(("queries", "keys"), [(LENGTH, LENGTH), (8, 17), (5, 5)])
def test_a_query_sees_its_document_and_window(queries: int, keys: int, window: int | None):
    """The last queries of the first keys of a sequence."""
    documents, ends = draw_documents()
    offsets = DocumentOffsets.of(ends, queries, keys)
    assert offsets.queries.dtype == torch.int32 and len(offsets.keys) == ends.numel() + 1
    for given in (offsets, None):
        mask = visible(2, queries, keys, torch.device("cpu"), window, given)
        assert mask.dtype == torch.bool
        for b, row in enumerate(documents.tolist()):
            wanted = [
                [
                    query - (window or LENGTH) < key <= query
                    and (given is None or row[key] == row[query])
                    for key in range(keys)
                ]
                for query in range(keys - queries, keys)
            ]
            assert mask.expand(2, -1, -1, -1)[b, 0].tolist() == wanted


def test_rotation_turns_pairs_by_position_times_frequency():
    width, theta, positions = 12, 500.0, torch.tensor([[0, 1, 7, 300]])
    x = torch.randn(1, 4, 2, width, generator=torch.Generator().manual_seed(0))
    rotated = rotate(x, RotaryTable.of(positions, Rope(width, theta)))
    frequency = theta ** -(torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    angle = positions[0, :, None, None] * frequency
    exact = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    # An angle is rounded in parts of the position.
    expect_sums(
        {"x": rotated},
        {"x": torch.cat((exact.real, exact.imag), dim=-1)},
        terms=int(positions.max()),
    )


def test_scores_depend_on_relative_positions_only():
    random, width = torch.Generator().manual_seed(0), 16
    query, key = (
        torch.randn(1, 1, 1, width, generator=random).double().expand(1, 40, 1, width)
        for _ in range(2)
    )
    positions = torch.arange(40)[None]
    with in_fp64():
        rotated = [
            rotate(x, RotaryTable.of(positions, Rope(width, 100.0)))[0, :, 0] for x in (query, key)
        ]
    scores = torch.einsum("qh,kh->qk", *rotated)
    distance = positions - positions.T
    first = torch.where(
        distance < 0, scores[-distance.clamp(max=0), 0], scores[0, distance.clamp(min=0)]
    )
    expect_sums({"scores": scores}, {"scores": first}, terms=width * 40, dtype=torch.float64)
    assert scores[0].std() > 0.5


@each_model
@torch.no_grad()
def test_shifted_positions_give_the_same_logits(model: ModelConfig):
    chunk, tokens = make_chunk(model).double(), draw_tokens(model, 2, LENGTH)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    with in_fp64():
        here, there, wide = (
            forward(chunk, tokens, places).x
            for places in (positions, positions + 100, positions * 2)
        )
    terms = (
        100 * model.hidden_size * model.num_layers
    )  # an angle is rounded in parts of the position
    expect_sums({"x": there}, {"x": here}, terms, dtype=torch.float64)
    assert not torch.allclose(wide, here, atol=0.1)


WIDE = ModelConfig(
    num_layers=3,
    hidden_size=96,
    ffn_hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=128,
    qk_norm=True,
    init_std=0.05,
    moe=dataclasses.replace(SHARED, ffn_hidden_size=32, first_k_dense=1),
)
RESIDUAL = WIDE.init_std / math.sqrt(2 * WIDE.num_layers)
STD = {
    "embedding": 0.05,
    "head": 0.05,
    "wqkv": 0.05,
    "w_up": 0.05,
    "router.weight": 0.05,
    "shared_gate": 0.05,
    "wo": RESIDUAL,
    "w_down": RESIDUAL,
}


def weights_of(model: ModelConfig, **options: Any) -> dict[str, Tensor]:
    """Initial weights by global name, over all chunks."""
    return {
        name: param.detach()
        for chunk in make_chunks(model, **options)
        for name, param in named_parameters(chunk)
    }


def kind_of(name: str) -> str:
    return "router.weight" if name.endswith("router.weight") else name.rsplit(".", 1)[-1]


def test_initial_weights_follow_the_table():
    weights = weights_of(WIDE)
    assert {kind_of(name) for name in weights} == STD.keys() | {"weight"}
    for name, value in weights.items():
        if kind_of(name) == "weight":
            assert value.dim() == 1 and value.eq(1).all()
            continue
        for part in value if value.dim() == 3 else value[None]:  # every expert by itself
            z = part / STD[kind_of(name)]
            # five standard errors of a standard normal sample's deviation and mean
            assert abs(z.std() - 1) < 5 / math.sqrt(2 * z.numel()), name
            assert abs(z.mean()) < 5 / math.sqrt(z.numel()) and z.abs().max() < 6, name
    assert all(not buffer.any() for buffer in make_chunk(WIDE).buffers())


def test_different_names_and_seeds_have_different_values():
    parts = [
        part
        for seed in (1, 2)
        for value in weights_of(WIDE, seed=seed).values()
        if value.dim() > 1
        for part in (value if value.dim() == 3 else value[None])
    ]
    starts = {
        tuple(round(z, 3) for z in (part / part.std()).flatten()[:6].tolist()) for part in parts
    }
    assert len(starts) == len(parts)


@pytest.mark.parametrize("ep", [2, 4])
def test_initial_weights_do_not_depend_on_expert_sharding(ep: int):
    whole, parts = weights_of(WIDE), [weights_of(WIDE, ep=ep, rank=rank) for rank in range(ep)]
    for name, value in whole.items():
        if ".experts." in name:
            assert parts[0][name].shape[0] == 8 // ep
            assert torch.equal(torch.cat([part[name] for part in parts]), value), name
        else:
            assert all(torch.equal(part[name], value) for part in parts), name


def test_initial_weights_do_not_depend_on_stages_order_or_dtype():
    whole = weights_of(WIDE)
    for other in (weights_of(WIDE, vpp=3), weights_of(WIDE, params=Dtype.bfloat16)):
        assert other.keys() == whole.keys()
        assert all(
            torch.equal(other[name], value.to(other[name].dtype)) for name, value in whole.items()
        )
    again = {name: torch.full_like(value, math.nan) for name, value in reversed(whole.items())}
    named = {each.name: each for each in model_weights(WIDE)}
    weights = [(named[name], value) for name, value in again.items()]
    init_weights(weights, ShardCoords(), WIDE, seed=1)
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_initialisation_does_not_touch_the_global_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    make_chunk(TINY)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("model", [model for model in MODELS.values() if not model.tie_embeddings])
@torch.no_grad()
def test_stages_in_a_row_are_the_whole_model(model: ModelConfig):
    tokens, stages = draw_tokens(model, 2, LENGTH), make_chunks(model, vpp=3)
    x, reports = tokens, []
    for stage in stages:
        out = stage(x, stage.context(torch.arange(LENGTH).expand(2, LENGTH), None))
        x, reports = out.x, [*reports, *out.routing]
    whole = forward(make_chunk(model), tokens)
    assert torch.equal(stages[-1].logits(x), whole.x) and len(reports) == len(whole.routing)


ATTN, FEED = ["attn"], ["route", "preprocess", "dispatch", "experts", "combine", "finish"]
LISTS = {
    "dense": (dataclasses.replace(TINY, moe=None), [*ATTN, "mlp"]),
    "moe": (dataclasses.replace(TINY, moe=MOE), [*ATTN, "norm", *FEED]),
    "shared": (dataclasses.replace(TINY, moe=SHARED), [*ATTN, "norm", "shared", *FEED]),
}
each_list = pytest.mark.parametrize(("model", "names"), LISTS.values(), ids=LISTS)


def layers_of(model: ModelConfig, **options: Any) -> list[Layer]:
    return list(make_chunk(model, **options).layers.values())


@each_list
def test_phases_are_in_order_and_read_only_what_is_there(model: ModelConfig, names: list[str]):
    for layer in layers_of(model):
        assert [phase.name.value for phase in layer.phases] == names
        known = {"x", "context"}
        for phase in layer.phases:
            assert known.issuperset(phase.inputs), phase.name
            known.update(phase.outputs)
        assert layer.phases[-1].outputs == ("x",)
        assert ("routing" in known) == (model.moe is not None)


@each_list
@torch.no_grad()
def test_a_layer_cut_anywhere_computes_the_same(model: ModelConfig, names: list[str]):
    layer = layers_of(dataclasses.replace(model, init_std=0.4))[-1]
    x = torch.randn(2, LENGTH, model.hidden_size, generator=torch.Generator().manual_seed(0))
    context = layer_context(torch.arange(LENGTH)[None], None, [model.rope])
    whole, _ = layer(x, context)
    for cut in range(1, len(names)):
        first, second = layer.phases[:cut], layer.phases[cut:]
        crossing = {name for phase in second for name in phase.inputs}
        values = run_phases(first, {"x": x, "context": context}, crossing)
        assert torch.equal(run_phases(second, values, ("x",))["x"], whole), names[cut]


def test_values_are_dropped_after_their_last_reader():
    seen: dict[str, weakref.ref[Tensor]] = {}

    def make(*_: Tensor) -> tuple[Tensor]:
        seen["a"] = weakref.ref(out := torch.ones(1))
        return (out,)

    def last(b: Tensor) -> tuple[Tensor]:
        assert seen["a"]() is None, "nobody reads a any more"
        return (b,)

    phases = [
        Phase(PhaseName.norm, make, ("x",), outputs=("a",)),
        Phase(PhaseName.route, lambda a: (a + 1,), ("a",), outputs=("b",)),
        Phase(PhaseName.finish, last, ("b",), outputs=("x",)),
    ]
    assert run_phases(phases, {"x": torch.ones(1)}, ("x", "routing"))["x"].item() == 2


@pytest.mark.every(4)
@each_list
def test_phases_without_host_sync_never_look_at_values(model: ModelConfig, names: list[str]):
    # Fake tensors have no values: reading one (item, nonzero, a boolean mask as index) raises.
    # Grouped GEMMs: bf16 only.
    with FakeTensorMode():
        chunk = make_chunk(model, params=Dtype.bfloat16)
        assert not any(phase.host_sync for layer in chunk.layers.values() for phase in layer.phases)
        tokens = torch.zeros(2, LENGTH + 1, dtype=torch.int64)
        loss, out = mean_loss(chunk, tokens)
        masked = forward(
            chunk, tokens, torch.zeros_like(tokens), ends_BD=torch.ones(2, 3, dtype=torch.int32)
        )
        (loss + masked.x.float().sum()).backward()
        assert out.x.shape == (2, LENGTH, model.hidden_size) and masked.x.shape == (
            2,
            LENGTH + 1,
            model.vocab_size,
        )
        assert all(param.grad.shape == param.shape for param in chunk.parameters())


def test_fake_tensors_do_catch_a_host_sync():
    reads = Phase(PhaseName.route, lambda x: (x * x.sum().item(),), ("x",), outputs=("x",))
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        run_phases([reads], {"x": torch.ones(3)}, ("x",))


def test_only_an_exchange_of_tokens_waits_for_the_device():
    layer = layers_of(dataclasses.replace(TINY, moe=SHARED), ep=2)[0]
    assert isinstance(layer.body.dispatcher, AllToAllDispatcher)
    assert [phase.name.value for phase in layer.phases if phase.host_sync] == ["dispatch"]
    padded = dataclasses.replace(SHARED, capacity_factor=1.0, pad_to_capacity=True)
    layer = layers_of(dataclasses.replace(TINY, moe=padded), ep=2)[0]
    assert not any(phase.host_sync for phase in layer.phases)


def test_moe_phases_match_the_program_in_their_docstring():
    body = layers_of(dataclasses.replace(TINY, moe=SHARED))[0].body
    lines = [line.partition("  #")[0].strip() for line in MoEBody.__doc__.splitlines()]
    assert [line for line in lines if " = " in line] == [
        f"{', '.join(phase.outputs)} = {phase.name.value}({', '.join(phase.inputs)})"
        for phase in body.phases
    ]


@each_model
@pytest.mark.parametrize("params", [Dtype.float32, Dtype.bfloat16], ids=lambda d: d.value)
def test_forward_and_backward_repeat_bit_for_bit(model: ModelConfig, params: Dtype):
    def once() -> list[Tensor]:
        chunk = make_chunk(model, params=params)
        loss, out = mean_loss(chunk, draw_tokens(model, 2, LENGTH + 1))
        loss.backward()
        return [loss.detach(), out.x.detach(), *(param.grad for param in chunk.parameters())]

    first, second = once(), once()
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))


@each_model
def test_reports_count_every_choice_once(model: ModelConfig):
    _, out = mean_loss(make_chunk(model), draw_tokens(model, 2, LENGTH + 1))
    assert len(out.routing) == sum(map(model.is_moe_layer, range(model.num_layers)))
    for report in out.routing:
        assert report.counts_E.sum() == 2 * LENGTH * model.moe.top_k and report.loss.requires_grad
        expect_sums({"loss": report.loss}, {"loss": report.aux_loss + report.z_loss}, terms=2)
