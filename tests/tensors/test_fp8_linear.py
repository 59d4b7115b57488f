"""Linear modules in FP8: every way of a weight's gradient, what is kept, when weights are
quantised, which weights are, and what a host lacks.

Shapes: B sequences, S tokens, IN and OUT widths.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.choices import Dtype, Fp8Part, Fp8Recipe, LinearBackendKind
from app.config import Fp8Config, ModelConfig, MoEConfig, ParallelConfig, PrecisionConfig
from app.engine.fp8 import build_fp8, fp8_line
from app.engine.run.host import check_host
from app.errors import ConfigError
from app.fp8 import transformer_engine
from app.fp8.linear import Fp8Layers, Fp8Linear
from app.fp8.reference import BlockScaled, Reference, TensorScaled
from app.model.chunk import Chunk
from app.model.layers import transformer_engine as library
from app.model.layers.linear import ColumnParallelLinear, LinearModule, RowParallelLinear
from app.model.layers.weight_grads import MainGradSink, WeightGrad, WeightGradQueue
from app.plan.model.fp8 import fp8_weights
from app.plan.model.weight import Weight
from app.plan.stages import Stage
from tests.runs import LATENT, TINY, make_run
from tests.tensors.fp8_linear import kept_bytes
from tests.tensors.models import draw_tokens, make_chunk

B, S, IN, OUT = 2, 24, 64, 48
CPU = torch.device("cpu")
RECIPES = {"current": TensorScaled(), "block": BlockScaled()}
BOTH = (Fp8Part.linear, Fp8Part.head)
WIDE = dataclasses.replace(TINY, num_layers=4, ffn_hidden_size=64)
DENSE = dataclasses.replace(WIDE, moe=None)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def module_of(kind: type[LinearModule], recipe: str) -> Any:
    module = kind(Weight((OUT, IN))).to(torch.bfloat16)
    module.weight.data = normal(OUT, IN, seed=2)
    module.backend = Fp8Linear(RECIPES[recipe], module.weight)
    return module


def results(module: Any, route: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and the gradients of the input and, in fp32 by the sinks, of the weight."""
    total = torch.zeros(OUT, IN)

    def add(param: nn.Parameter, gradient: WeightGrad) -> None:
        assert param is module.weight
        gradient.add_to(total)

    queue = WeightGradQueue()
    sink = {"autograd": None, "at once": MainGradSink(add), "deferred": queue}[route]
    module.weight.grad = None
    x = normal(B, S, IN).requires_grad_()
    out = module(x, sink)
    out.backward(normal(B, S, OUT, seed=1))
    queue.run(add)
    assert x.grad is not None and (module.weight.grad is None) == (route != "autograd")
    return out.detach(), x.grad, total if route != "autograd" else module.weight.grad


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_every_way_of_a_gradient_has_the_same_numbers(kind: type[LinearModule], recipe: str):
    module = module_of(kind, recipe)
    arithmetic: Reference = RECIPES[recipe]
    x, grad = normal(B, S, IN).flatten(0, 1), normal(B, S, OUT, seed=1).flatten(0, 1)
    in_8 = arithmetic.input(x), arithmetic.weight(module.weight.detach()), arithmetic.grad(grad)
    expected = (
        arithmetic.output(in_8[0], in_8[1], torch.bfloat16).view(B, S, OUT),
        arithmetic.input_grad(in_8[2], in_8[1], torch.bfloat16).view(B, S, IN),
        arithmetic.weight_grad(in_8[2], in_8[0], torch.float32),
    )
    for route in ("autograd", "at once", "deferred"):
        found = results(module, route)
        wanted = expected[2].to(found[2].dtype)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), route
        assert torch.equal(found[2], wanted), route
    assert module.backend.times == 1


def test_backward_keeps_a_byte_per_element_of_the_input():
    x = normal(B, S, IN).requires_grad_()
    sink = WeightGradQueue()
    for recipe, scales in (("current", 1), ("block", IN)):
        module = module_of(ColumnParallelLinear, recipe)
        kept = kept_bytes(lambda module=module: module(x, sink))
        assert kept == x.numel() + 4 * scales, recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_is_quantised_once_per_change_in_fixed_memory(recipe: str):
    chunk = make_chunk(DENSE)
    layers = Fp8Layers([chunk], lambda name: RECIPES[recipe])
    names = [each.name for each in fp8_weights(DENSE, in_8(recipe), stage_of(chunk))]
    layers.use(chunk, names)
    layers.watch()
    places = {
        name: [each.data_ptr() for each in linear.held.tensors() if each is not None]
        for name, linear in layers.linears.items()
    }
    tokens = draw_tokens(DENSE, 2, 9)
    context = chunk.context(torch.arange(8).expand(2, 8), None)

    def loss() -> Tensor:
        return chunk.loss(chunk(tokens[:, :-1], context).x, tokens[:, 1:], context)

    first = loss()
    first.backward()
    assert torch.equal(loss(), first)
    assert {linear.times for linear in layers.linears.values()} == {1}
    with torch.no_grad():
        for param in chunk.parameters():
            param.mul_(2)
    assert torch.isclose(loss(), first, rtol=0.2)  # norms have changed, and quantised weights not
    stale = loss()
    layers.expire()
    assert {linear.times for linear in layers.linears.values()} == {1}
    assert not torch.equal(loss(), stale)
    assert {linear.times for linear in layers.linears.values()} == {2}
    for name, linear in layers.linears.items():
        now = [each.data_ptr() for each in linear.held.tensors() if each is not None]
        assert now == places[name], name
        fresh = RECIPES[recipe].weight(linear.weight.detach())
        assert torch.equal(RECIPES[recipe].weights(linear.held), RECIPES[recipe].weights(fresh))


def in_8(recipe: str = "current", **choices: Any) -> Fp8Config:
    return Fp8Config(Fp8Recipe(recipe), **({"include": BOTH} | choices))


def stage_of(chunk: Chunk) -> Stage:
    return Stage(tuple(map(int, chunk.layers)), embedding=chunk.first, head=chunk.last)


SHARED = dataclasses.replace(WIDE, tie_embeddings=True)
LATENT_WIDE = dataclasses.replace(
    LATENT,
    num_layers=2,
    mla=dataclasses.replace(
        LATENT.mla,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    ),
)


@pytest.mark.parametrize("model", [DENSE, SHARED, LATENT_WIDE], ids=["dense", "tied", "latent"])
def test_every_linear_layer_is_in_fp8_and_nothing_else(model: ModelConfig):
    chunk = make_chunk(model)
    run = make_run(model, precision=PrecisionConfig(fp8=in_8()))
    layers = build_fp8(run, [chunk], SimpleNamespace(), device=CPU)
    assert layers is not None
    found = {
        name
        for name, module in chunk.named_modules()
        if isinstance(getattr(module, "backend", None), Fp8Linear)
    }
    linear = {
        name
        for name, module in chunk.named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    }
    assert found == set(layers.linears) == linear - ({"embedding"} - found)
    assert ("embedding" in found) == model.tie_embeddings and ("head" in found) != (
        "embedding" in found
    )
    some = dataclasses.replace(run.precision.fp8, include=(Fp8Part.linear,), first_layers=1)
    names = [each.name for each in fp8_weights(model, some, stage_of(chunk))]
    assert names and {name.split(".")[1] for name in names} == set(
        map(str, range(1, model.num_layers))
    )


OVERLAPPING = MoEConfig(8, shared_ffn_hidden_size=16, shared_overlap=True)


def test_a_run_says_at_its_start_what_computes_which_matrices():
    run = make_run(DENSE, precision=PrecisionConfig(Dtype.bfloat16, fp8=in_8("block")))
    assert fp8_line(run, CPU) == (
        "17 matrices of linear and head, recipe block, by the reference in torch, multiplied in "
        "fp32: slow; else bfloat16"
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": (
        {"precision": PrecisionConfig(Dtype.float16, fp8=in_8())},
        "precision.fp8.recipe=current: needs parameters in bfloat16",
    ),
    "widths": (
        {"model": dataclasses.replace(DENSE, ffn_hidden_size=40)},
        "precision.fp8.include=[linear, head]: widths of a matrix in FP8 are multiples of "
        "16, and layers.0.body.mlp.w_down has 32 × 40; did you mean [head] or "
        "precision.fp8.recipe=null?",
    ),
    "widths of a rank": (
        {"model": TINY, "parallel": ParallelConfig(tp=2)},
        "layers.0.body.mlp.w_down has 32 × 24 on each of tp=2 ranks",
    ),
    "no layers": (
        {"precision": PrecisionConfig(fp8=in_8(first_layers=1, last_layers=3))},
        "precision.fp8.last_layers=3: with first_layers=1 leaves none of 4 layers in FP8; "
        "did you mean 2?",
    ),
    "a shared expert beside": (
        {
            "model": dataclasses.replace(
                WIDE, moe=MoEConfig(8, shared_ffn_hidden_size=16, shared_overlap=True)
            )
        },
        "model.moe.shared_overlap=true: runs the shared expert beside the routed ones",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fp8_do_not_go_with_is_said_in_one_line(case: str):
    sections, words = REFUSED[case]
    model = sections.get("model", DENSE)
    rest = {name: section for name, section in sections.items() if name != "model"}
    with pytest.raises(ConfigError) as refused:
        make_run(model, **({"precision": PrecisionConfig(fp8=in_8())} | rest))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_recipe_for_nothing_is_refused():
    with pytest.raises(
        ConfigError, match=r"precision.fp8.include=\[\]: .* needs layers to apply to"
    ):
        in_8(include=())


def refusal(asked: LinearBackendKind = LinearBackendKind.auto) -> str:
    with pytest.raises(ConfigError) as refused:
        transformer_engine.fp8_library(asked, Fp8Recipe.block)
    return str(refused.value)


def test_error_without_transformer_engine_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
):
    def version(text: str) -> None:
        monkeypatch.setattr(metadata, "version", lambda name: text)

    install = "; pip install 'graphfold[gpu]' --no-build-isolation"
    line = refusal()
    assert line.startswith("precision.fp8.backend=auto: Transformer Engine is not installed")
    assert line.endswith(install) and "precision.fp8.recipe=null" in line
    version("2.9.0+4242")
    assert "Transformer Engine 2.9.0+4242 is older than 2.20" in refusal()
    version("2.20.2")
    assert "Transformer Engine cannot be loaded: No module named" in refusal()

    def fails(name: str) -> None:  # as pydantic does beside a core of another version
        raise SystemError("The installed pydantic-core version is incompatible\nwith this one")

    with monkeypatch.context() as broken:
        broken.setattr(library, "import_module", fails)
        assert "cannot be loaded: The installed pydantic-core version is incompatible" in refusal()
    lacks = SimpleNamespace(
        is_fp8_block_scaling_available=lambda return_reason: (False, "needs CUDA 12.9")
    )
    monkeypatch.setattr(transformer_engine, "import_library", lambda refused: lacks)
    assert refusal().startswith(
        "precision.fp8.recipe=block: this GPU has no FP8 GEMM for this recipe: needs CUDA 12.9"
    )
    by_library = in_8(backend=LinearBackendKind.transformer_engine)
    with pytest.raises(ConfigError, match="computes on GPUs, and this run does on a CPU"):
        check_host(make_run(DENSE, precision=PrecisionConfig(fp8=by_library)), CPU)
    check_host(make_run(DENSE, precision=PrecisionConfig(fp8=in_8())), CPU)
