"""Lines about slow paths, and refusals of what a GPU cannot capture."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from app.choices import (
    AttentionBackendKind,
    DispatcherKind,
    Dtype,
    Fp8Part,
    Fp8Recipe,
    GraphImpl,
    GraphScope,
    LinearBackendKind,
    StaticTransport,
)
from app.config import CudaGraphConfig, Fp8Config, ParallelConfig, PrecisionConfig, TrainConfig
from app.config.experts import StaticConfig
from app.engine import fast_paths
from app.engine.fast_paths import check_capturable, graphs_line, slow_paths
from app.errors import ConfigError
from tests.distributed import run_distributed
from tests.runs import TINY, engine_of, make_run

EAGER, LAYERS = CudaGraphConfig(), CudaGraphConfig(GraphImpl.local)
GPU, CPU = torch.device("cuda"), torch.device("cpu")
FAST = TrainConfig(seq_len=16, micro_batch=2, global_batch=8, deterministic=False)
BF16 = PrecisionConfig(Dtype.bfloat16)


def test_a_line_for_each_slow_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fast_paths, "moves_tiles", lambda device: True)
    assert list(slow_paths(make_run(train=FAST, precision=BF16), GPU)) == []
    assert list(slow_paths(make_run(), CPU)) == []
    monkeypatch.setattr(fast_paths, "triton", None)
    monkeypatch.setattr(fast_paths, "moves_tiles", lambda device: False)
    slow = dict(slow_paths(make_run(precision=PrecisionConfig(Dtype.float16)), GPU))
    assert list(slow) == ["kernels", "attention", "experts", "gradients"]
    assert all(len(line) < 150 and "\n" not in line for line in slow.values()), slow
    faster = "train.attention_backend=transformer_engine"
    assert faster not in slow["attention"]  # auto has tried it
    half = PrecisionConfig(Dtype.float16)
    typed = dataclasses.replace(make_run().train, attention_backend=AttentionBackendKind.torch)
    slow = dict(slow_paths(make_run(train=typed, precision=half), GPU))
    assert faster in slow["attention"]  # which takes no float32
    assert faster not in dict(slow_paths(make_run(), GPU))["attention"]
    long = dataclasses.replace(FAST, deterministic=True, seq_len=16384)
    assert faster not in dict(slow_paths(make_run(train=long, precision=BF16), GPU))["attention"]
    dense = dataclasses.replace(TINY, moe=None)
    assert list(dict(slow_paths(make_run(dense), GPU))) == ["kernels", "attention"]
    assert "gradients" not in dict(slow_paths(make_run(), GPU))  # fp32 is added to fp32


@pytest.mark.parametrize(
    ("fp8", "graph", "words"),
    [
        (Fp8Config(Fp8Recipe.delayed), EAGER, "launched by the host, with cuda_graph=none"),
        (Fp8Config(Fp8Recipe.delayed), LAYERS, None),
        (Fp8Config(Fp8Recipe.block), LAYERS, "precision.fp8.recipe=delayed does"),
        (Fp8Config(Fp8Recipe.current, backend=LinearBackendKind.torch), LAYERS, "the reference"),
        (Fp8Config(Fp8Recipe.current, include=(Fp8Part.experts,)), EAGER, None),
    ],
)
def test_a_line_where_fp8_have_not_paid(
    fp8: Fp8Config, graph: CudaGraphConfig, words: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fast_paths, "moves_tiles", lambda device: True)
    precision = dataclasses.replace(BF16, fp8=fp8)
    run = make_run(train=FAST, precision=precision, cuda_graph=graph)
    said = dict(slow_paths(run, GPU)).get("FP8")
    assert (said is None) if words is None else (words in said and len(said) < 150)
    assert "FP8" not in dict(slow_paths(run, CPU))  # the line fp8 says so there


def said_of_static(rank: int, transport: StaticTransport) -> list[tuple[str, str]]:
    moe = dataclasses.replace(
        TINY.moe, dispatcher=DispatcherKind.static, static=StaticConfig(transport)
    )
    model = dataclasses.replace(TINY, moe=moe)
    run = make_run(model, parallel=ParallelConfig(ep=2, dp=2))
    return list(slow_paths(run, CPU, engine_of(run, rank).static))


def test_fallback_from_peer_transport_is_reported():
    (line,) = run_distributed(said_of_static, 2, StaticTransport.auto)[0]
    assert line == ("dispatch", "by collectives, since this is a CPU: the same results")
    assert run_distributed(said_of_static, 2, StaticTransport.collective)[0] == []


WHOLE = CudaGraphConfig(GraphImpl.full_iteration)


def test_experts_in_other_types_are_not_captured():
    for graph in (
        WHOLE,
        CudaGraphConfig(GraphImpl.local),
        CudaGraphConfig(GraphImpl.local, (GraphScope.moe,)),
    ):
        with pytest.raises(ConfigError, match="precision=bf16 or cuda_graph=partial"):
            check_capturable(make_run(cuda_graph=graph), GPU)
        check_capturable(make_run(cuda_graph=graph), CPU)
        check_capturable(make_run(cuda_graph=graph, precision=BF16), GPU)
    check_capturable(
        make_run(
            cuda_graph=CudaGraphConfig(GraphImpl.local, (GraphScope.attn, GraphScope.moe_router))
        ),
        GPU,
    )
    check_capturable(make_run(dataclasses.replace(TINY, moe=None), cuda_graph=WHOLE), GPU)


def test_updates_are_captured_with_their_kernel_only(monkeypatch: pytest.MonkeyPatch):
    dense = dataclasses.replace(TINY, moe=None)
    run = make_run(dense, cuda_graph=dataclasses.replace(WHOLE, optimizer=True))
    check_capturable(run, GPU)
    monkeypatch.setattr(fast_paths, "triton", None)
    check_capturable(run, CPU)
    check_capturable(make_run(dense, cuda_graph=WHOLE), GPU)
    with pytest.raises(
        ConfigError, match=r"cuda_graph\.optimizer=true: captures AdamW, which makes"
    ):
        check_capturable(run, GPU)


def test_opening_names_captured_parts():
    attention = make_run(
        cuda_graph=CudaGraphConfig(GraphImpl.local, (GraphScope.attn,), warmup_steps=2)
    )
    assert graphs_line(attention, GPU) == "attn, captured in step 3 of this process"
    assert graphs_line(make_run(cuda_graph=CudaGraphConfig(GraphImpl.local)), GPU).startswith(
        "whole layers, captured in step 4"
    )
    assert "stand-in" in graphs_line(make_run(cuda_graph=WHOLE), CPU)
    updating = make_run(cuda_graph=dataclasses.replace(WHOLE, optimizer=True))
    for run, what in ((make_run(cuda_graph=WHOLE), ""), (updating, " with their updates,")):
        said = f"full iterations{what} and validations, captured in step 4 of this process"
        assert graphs_line(run, GPU) == said
