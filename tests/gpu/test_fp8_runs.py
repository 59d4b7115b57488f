"""Training in FP8 by Transformer Engine: graphs and resumed runs repeat eager ones bit for
bit, and several GPUs train as one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from app.choices import (
    Dtype,
    Fp8Part,
    Fp8Recipe,
    GraphImpl,
    GraphScope,
    Recompute,
    ScheduleName,
)
from app.config import (
    CudaGraphConfig,
    Fp8Config,
    LossConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.engine.files.checkpoints import newest_checkpoint
from tests.gpu.fp8_runs import FOUR
from tests.gpu.in_process import print_trained, trained_alone
from tests.gpu.programs import GPUS, losses, printed_by_ranks
from tests.runs import make_run

pytest.importorskip("transformer_engine")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]
RECIPES = tuple(Fp8Recipe)
BOTH = (Fp8Part.linear, Fp8Part.head)
ROUTED = dataclasses.replace(
    FOUR, moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=64, shared_ffn_hidden_size=64)
)
EAGER, WHOLE = CudaGraphConfig(), CudaGraphConfig(GraphImpl.full_iteration)
UPDATES = dataclasses.replace(WHOLE, optimizer=True)
PARTS = (GraphScope.attn, GraphScope.mlp)
GRAPHS = {
    "attn": CudaGraphConfig(GraphImpl.local, (GraphScope.attn,)),
    "partial": CudaGraphConfig(GraphImpl.local, PARTS),
    "layer": CudaGraphConfig(GraphImpl.local),
    "full iteration": WHOLE,
    "full iteration with its update": UPDATES,
    "attn by Transformer Engine": CudaGraphConfig(GraphImpl.transformer_engine, (GraphScope.attn,)),
    "partial by Transformer Engine": CudaGraphConfig(GraphImpl.transformer_engine, PARTS),
    "layer by Transformer Engine": CudaGraphConfig(GraphImpl.transformer_engine),
}


def run_of(
    recipe: Fp8Recipe,
    graph: CudaGraphConfig = EAGER,
    model: ModelConfig = FOUR,
    include: tuple[Fp8Part, ...] = BOTH,
    **sections: Any,
) -> Run:
    return make_run(
        model,
        precision=PrecisionConfig(Dtype.bfloat16, fp8=Fp8Config(recipe, include=include)),
        cuda_graph=graph,
        train=TrainConfig(steps=60, seq_len=256, micro_batch=2, global_batch=8),
        **sections,
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.value)
def test_graphs_repeat_sixty_eager_steps(recipe: Fp8Recipe):
    """With validations between them, which see the weights of the last update."""
    eager = trained_alone(run_of(recipe), steps=60, validates=10)
    assert len(eager) == 60 and eager[-1][0] < 0.8 * eager[0][0]
    assert len({row[2] for row in eager[9::10]}) == 6
    for name, graph in GRAPHS.items():
        assert trained_alone(run_of(recipe, graph), steps=60, validates=10) == eager, name


# as Qwen2 has them; dense, and with routed and shared experts
BIASED = {
    "dense": (dataclasses.replace(FOUR, qkv_bias=True), BOTH),
    "moe": (dataclasses.replace(ROUTED, qkv_bias=True), (Fp8Part.linear,)),
}
SCOPES = {
    "attn": (GraphScope.attn,),
    "partial": (*PARTS, GraphScope.moe_router, GraphScope.moe_preprocess),
    "layer": (),
    "moe": (*PARTS, GraphScope.moe),
}
WARMUP, FEW_STEPS = 1, 4
BIASED_GRAPHS = {
    **{
        f"{name}, {impl.value}": CudaGraphConfig(impl, scope, WARMUP)
        for name, scope in SCOPES.items()
        for impl in (GraphImpl.local, GraphImpl.transformer_engine)
    },
    "full iteration": dataclasses.replace(WHOLE, warmup_steps=WARMUP),
    "full iteration with its update": dataclasses.replace(UPDATES, warmup_steps=WARMUP),
}


@pytest.mark.parametrize("seq_len", [256, 251], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", BIASED)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.value)
def test_biases_train_and_graphs_repeat_eager_steps(recipe: Fp8Recipe, kind: str, seq_len: int):
    """Also with as many tokens as the library has to pad."""
    model, include = BIASED[kind]
    # one sequence: 251 tokens are no multiple of what tensor cores load
    train = TrainConfig(steps=60, seq_len=seq_len, micro_batch=1, global_batch=4)

    def first_steps(graph: CudaGraphConfig) -> list[list[float]]:
        run = dataclasses.replace(run_of(recipe, graph, model, include), train=train)
        return trained_alone(run, steps=FEW_STEPS)

    eager = first_steps(EAGER)
    assert all(math.isfinite(number) for row in eager for number in row)
    for name, graph in BIASED_GRAPHS.items():
        if graph.scope != SCOPES["moe"] or kind == "moe":
            assert first_steps(graph) == eager, name


RECOMPUTED = {
    "every layer": RecomputeConfig(full=True),
    "parts": RecomputeConfig(phases=(Recompute.norm, Recompute.mlp_act)),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.value)
def test_recompute_is_bit_identical(recipe: Fp8Recipe):
    kept = trained_alone(run_of(recipe), steps=20)
    for name, recompute in RECOMPUTED.items():
        for graph in (EAGER, WHOLE):
            again = run_of(recipe, graph, recompute=recompute)
            assert trained_alone(again, steps=20) == kept, (name, graph.impl)


ROUTED_PARTS = (GraphScope.attn, GraphScope.moe_router, GraphScope.moe_preprocess)


@pytest.mark.parametrize("impl", [GraphImpl.local, GraphImpl.transformer_engine])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.value)
def test_parts_of_layers_with_experts_repeat_eager_steps(recipe: Fp8Recipe, impl: GraphImpl):
    """`cuda_graph=partial`, with shared experts in FP8."""
    eager, graphs = (
        trained_alone(run_of(recipe, graph, ROUTED, (Fp8Part.linear,)), steps=20)
        for graph in (EAGER, CudaGraphConfig(impl, ROUTED_PARTS))
    )
    assert graphs == eager


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.value)
def test_parameters_in_float32(recipe: Fp8Recipe):
    wide = PrecisionConfig(Dtype.float32, fp8=Fp8Config(recipe, include=BOTH))
    eager, graph = (
        trained_alone(dataclasses.replace(run_of(recipe, graph), precision=wide), steps=20)
        for graph in (EAGER, WHOLE)
    )
    assert graph == eager
    narrow = trained_alone(run_of(recipe), steps=20)
    # later ones part by more without FP8 too: the first steps at this rate are unstable
    assert abs(eager[0][0] - narrow[0][0]) < 0.02 and eager[-1][0] < 0.8 * eager[0][0]


@pytest.mark.parametrize("chosen", ["chunks of the head", "shared experts"])
def test_chunks_of_the_head_and_shared_experts(chosen: str):
    given: dict[str, Any] = {
        "chunks of the head": {"loss": LossConfig(chunk_tokens=128)},
        "shared experts": {"model": ROUTED, "include": (Fp8Part.linear,)},
    }[chosen]
    eager, graphs = (
        trained_alone(run_of(Fp8Recipe.current, graph, **given), steps=20)
        for graph in (EAGER, WHOLE)
    )
    assert graphs == eager


@pytest.mark.parametrize("graph", [EAGER, WHOLE], ids=["eager", "full iteration"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.value)
def test_a_resumed_run_repeats_one_that_was_not_stopped(
    tmp_path: Path, recipe: Fp8Recipe, graph: CudaGraphConfig
):
    run = run_of(recipe, graph)
    whole = trained_alone(run, steps=20)
    checkpoints = tmp_path / "checkpoints"
    trained_alone(run, steps=10, save_to=checkpoints)
    saved = newest_checkpoint(tmp_path)
    assert saved is not None
    assert trained_alone(run, steps=20, resume=saved) == whole[10:]


def test_program_resumes_in_fp8(tmp_path: Path):
    """Each start takes half a minute, so every case has only as many as it needs."""
    given = (
        "model=dense_tiny",
        "model.num_layers=4",
        "precision=bf16",
        "precision.fp8.recipe=delayed",
        "optim.decay_steps=60",
        "parallel.dp=1",
        "cuda_graph=full_iteration",
    )
    whole = losses(tmp_path / "whole", *given, "train.steps=20", first=11)
    saved = (*given, "checkpoint=default")
    losses(tmp_path / "parts", *saved, "train.steps=10")
    assert losses(tmp_path / "parts", *saved, "train.steps=20", "resume=auto", first=11) == whole


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel": ParallelConfig(tp=2)},
    "pp2": {"parallel": ParallelConfig(pp=2)},
    "zero bubble": {
        "parallel": ParallelConfig(pp=2),
        "schedule": ScheduleConfig(name=ScheduleName.zero_bubble_h1),
    },
    "dp2": {"parallel": ParallelConfig(dp=2)},
}
CASES = {
    f"{recipe.value}, {layout}": [
        run_of(recipe, graph, **sections) for graph in (EAGER, WHOLE, UPDATES)
    ]
    for recipe, (layout, sections) in itertools.product(RECIPES, LAYOUTS.items())
}


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_several_gpus_in_one_graph_each():
    found = dict(printed_by_ranks(__file__, 2))
    assert found.keys() == CASES.keys()
    one = {recipe.value: trained_alone(run_of(recipe), steps=20) for recipe in RECIPES}
    for name, (eager, *graphs) in found.items():
        assert graphs == [eager, eager], name
        alone = one[name.split(",")[0]]
        # the first loss differs by the rounding of parts that have scales of their own, at most
        assert abs(eager[0][0] - alone[0][0]) < 0.02 and abs(eager[-1][0] - alone[-1][0]) < 0.2


if __name__ == "__main__":
    print_trained(CASES, steps=20)
