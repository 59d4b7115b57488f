"""Parallel blocks in captured parts: phases read outputs of attention beside hidden states."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from app.choices import ActivationKind, BlockKind, GraphImpl, GraphScope, NormKind
from app.config import CudaGraphConfig, Run
from app.errors import ConfigError
from tests.distributed import run_distributed
from tests.parity import KINDS, Trained, results
from tests.processes.fp8_training import captured
from tests.runs import TINY, engine_of, make_run

STEPS = 4  # eager, captured, replayed twice more
MODELS: dict[str, dict[str, Any]] = {
    "parallel": {"block": BlockKind.parallel, "norm": NormKind.layer},
    "parallel_norms": {
        "block": BlockKind.parallel_norms,
        "norm": NormKind.layer_bias,
        "mlp_gate": False,
        "activation": ActivationKind.gelu,
    },
}
GRAPHS = {
    "eager": CudaGraphConfig(),
    "attn": captured(GraphImpl.local, GraphScope.attn),
    "attn, mlp": captured(GraphImpl.local, GraphScope.attn, GraphScope.mlp),
    "full iteration": captured(GraphImpl.full_iteration),
}


def trained(rank: int, runs: dict[str, Run]) -> dict[str, Trained]:
    found = {}
    for name, run in runs.items():
        engine = engine_of(run, rank)
        found[name] = results(engine, STEPS)
        assert name == "eager" or engine.recorder.recordings, name
        engine.release()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_captured_parts_compute_the_same(name: str):
    model = dataclasses.replace(TINY, moe=None, **MODELS[name])
    graphs = dict(GRAPHS)
    if name == "parallel_norms":
        with pytest.raises(ConfigError, match="otherwise if attn alone"):
            make_run(model, cuda_graph=graphs.pop("attn"))
    runs = {graph: make_run(model, cuda_graph=config) for graph, config in graphs.items()}
    found = run_distributed(trained, 1, runs)[0]
    eager = found.pop("eager")
    for graph, values in found.items():
        for kind in KINDS:
            assert values[kind].keys() == eager[kind].keys()
            for key, each in eager[kind].items():
                assert np.array_equal(values[kind][key], each), (graph, kind, key)
