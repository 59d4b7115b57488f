"""Delayed scaling in training: all ranks of a layer have the same scales.

Skipped, rerun and resumed steps, and validations, leave them as training without these would.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from app.choices import DispatcherKind, Dtype, Fp8Part, Fp8Recipe, StaticCapacity
from app.config import CudaGraphConfig, Fp8Config, ParallelConfig, PrecisionConfig, Run, TrainConfig
from app.config.experts import StaticConfig
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.files.checkpoints import read_manifest
from app.engine.step import shortage
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep, Validation
from tests.cases import chosen
from tests.checkpoints import save_checkpoint
from tests.distributed import run_distributed
from tests.processes.fp8_state import DENSE, STEPS, WHOLE
from tests.runs import TINY, TWO_MICROBATCHES, batches_of, engine_of, fp8_of, make_run

EAGER = CudaGraphConfig()
UPDATING = dataclasses.replace(WHOLE, optimizer=True)
GRAPHS = {"eager": EAGER, "full iteration": WHOLE, "full iteration, update": UPDATING}
Scales = dict[str, Any]  # global name of a weight -> its layer's scales, and what they are of


def run_of(model: Any = DENSE, params: Dtype = Dtype.float32, **sections: Any) -> Run:
    history = sections.pop("history", 3)
    fp8 = Fp8Config(Fp8Recipe.delayed, include=(Fp8Part.linear, Fp8Part.head), amax_history=history)
    given = {"precision": PrecisionConfig(params, fp8=fp8), "train": TWO_MICROBATCHES}
    return make_run(model, **(given | sections))


def scales_of(engine: Engine) -> Scales:
    scales = fp8_of(engine).scales
    assert scales is not None
    return {name: value.numpy().copy() for name, value in scales.state()}


def steps_of(rank: int, run: Run, steps: int, validates: bool = False) -> list[Scales]:
    """After each of some steps."""
    engine = engine_of(run, rank)
    step, validation = TrainingStep(engine), Validation(engine, 1)
    found = []
    for number in range(steps):
        batches = batches_of(run, number, engine.groups.dp_rank)
        step(batches, 1e-3, 0.1)
        if validates:
            validation([dataclasses.replace(b, tokens_BS=b.tokens_BS.flip(0)) for b in batches[:1]])
        found.append(scales_of(engine))
    engine.release()
    return found


def same(one: Scales, other: Scales) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


LAYOUTS = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2}}


@functools.cache
def one_rank() -> list[Scales]:
    return run_distributed(steps_of, 1, run_of(), 3)[0]


@pytest.mark.every(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_layer_agree_and_see_all_tokens_and_parts(layout: str):
    one = one_rank()
    found = run_distributed(steps_of, 2, run_of(parallel=ParallelConfig(**LAYOUTS[layout])), 3)
    if layout == "pp2":
        assert found[0][-1].keys().isdisjoint(found[1][-1])
        found = [[first | last for first, last in zip(*found, strict=True)]]
    for rank in found:
        assert same(rank[-1], found[0][-1]) and rank[-1].keys() == one[-1].keys()
        # initial weights, and what comes into the first layer, are the same everywhere
        for name, scales in one[0].items():
            assert (rank[0][name][1] == scales[1]).all(), name
        first = "layers.0.attn.wqkv"
        torch.testing.assert_close(rank[0][first][0], one[0][first][0], rtol=1e-5, atol=0.0)


@pytest.mark.full
def test_validations_and_graphs_leave_no_trace():
    runs = [run_of(cuda_graph=graph) for graph in GRAPHS.values()]
    plain, *captured = (run_distributed(steps_of, 1, run, STEPS)[0] for run in runs)
    validated = [run_distributed(steps_of, 1, run, STEPS, True)[0] for run in runs]
    for found in (*captured, *validated):
        assert all(same(mine, wanted) for mine, wanted in zip(found, plain, strict=True))
    assert not same(plain[-1], plain[-2])


def with_bad_step(rank: int, run: Run, bad: int) -> tuple[list[Scales], list[float], bool]:
    """One step's gradients have no finite norm."""
    engine = engine_of(run, rank)
    step, finite = TrainingStep(engine), engine.optimizer.local_norm_sq
    found, skipped = [], []
    capturable = True
    for number in range(STEPS):
        engine.optimizer.local_norm_sq = lambda number=number: (
            finite() * (float("nan") if number == bad else 1.0)
        )
        facts, _ = step(batches_of(run, number, 0), 1e-3, 0.1)
        if number == bad:
            capturable = fp8_of(engine).capturable
        skipped.append(facts.skipped)
        found.append(scales_of(engine))
    return found, skipped, capturable


@pytest.mark.parametrize("bad", [0, 3])
def test_a_skipped_step_leaves_the_scales_as_they_were(bad: int):
    found, skipped, capturable = run_distributed(with_bad_step, 1, run_of(), bad)[0]
    assert skipped == [float(number == bad) for number in range(STEPS)]
    assert capturable == (bad > 0)
    if bad:
        assert same(found[bad], found[bad - 1])
    else:  # nothing is known yet: the next step looks at its own entries again
        assert found[0] == {} and found[1]
    assert not same(found[-1], found[-2])


def taken_again(rank: int, run: Run) -> tuple[list[Any], list[int | None], Scales]:
    shortage.IN_A_ROW = 10**9  # memory does not grow
    torch.manual_seed(rank)
    engine = engine_of(run, rank)
    step, seen, again = TrainingStep(engine), [], []
    for number in range(STEPS):
        facts, _ = step(batches_of(run, number, engine.groups.dp_rank), 1e-3, 0.1)
        seen.append((facts.loss, facts.grad_norm))
        again.append(facts.reruns)
    scales = scales_of(engine)
    engine.release()
    return seen, again, scales


@pytest.mark.parametrize("graph", chosen(GRAPHS.values(), [EAGER]), ids=GRAPHS)
def test_rerun_step_counts_once(graph: CudaGraphConfig):
    """It computes what memory for all rows computes, to the last bit."""
    train = TrainConfig(steps=20, seq_len=256, micro_batch=2, global_batch=8)
    parallel = ParallelConfig(ep=2, dp=2)
    results = []
    for capture, limits in (
        (EAGER, StaticConfig(capacity=StaticCapacity.worst)),
        (graph, StaticConfig(capacity=StaticCapacity.factor, factor=1.1)),
    ):
        moe = dataclasses.replace(
            TINY.moe, dispatcher=DispatcherKind.static, static=limits, first_k_dense=0
        )
        model = dataclasses.replace(TINY, num_layers=2, moe=moe)
        run = run_of(model, parallel=parallel, train=train, cuda_graph=capture)
        results.append(run_distributed(taken_again, 2, run))
    for exact, found in zip(*results, strict=True):
        assert sum(found[1]) > 0 and set(exact[1]) == {None}
        assert found[0] == exact[0] and same(found[2], exact[2])


def saved_and_loaded(rank: int, runs: tuple[Run, Run], folder: Path) -> tuple[Any, Any]:
    """Losses and scales of a run of several steps, and of another one from its third step on."""
    first, second = (engine_of(run, rank) for run in runs)
    step, path, losses = TrainingStep(first), None, []
    for number in range(STEPS):
        losses.append(step(batches_of(runs[0], number, first.groups.dp_rank), 1e-3, 0.1)[0].loss)
        if number == 2:
            path = save_checkpoint(folder, first, runs[0], Progress(3, 3, 0), {"sequences": 0})
    assert path is not None
    load_checkpoint(path, read_manifest(path), second)
    step, resumed = TrainingStep(second), []
    for number in range(3, STEPS):
        batches = batches_of(runs[1], number, second.groups.dp_rank)
        resumed.append(step(batches, 1e-3, 0.1)[0].loss)
    found = (losses, scales_of(first)), (resumed, scales_of(second))
    first.release()
    second.release()
    return found


@pytest.mark.every(10)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize(
    "parallel", [ParallelConfig(tp=2), ParallelConfig(pp=2)], ids=["tp2", "pp2"]
)
def test_a_checkpoint_resumes_bit_for_bit(
    parallel: ParallelConfig, graph: CudaGraphConfig, tmp_path: Path
):
    run = run_of(params=Dtype.bfloat16, parallel=parallel, cuda_graph=graph)
    for wanted, found in run_distributed(saved_and_loaded, 2, (run, run), tmp_path):
        assert found[0] == wanted[0][3:] and same(found[1], wanted[1])


def test_scales_survive_new_layout_and_shorter_history(tmp_path: Path):
    tp2, dp2 = (ParallelConfig(**degrees) for degrees in ({"tp": 2}, {"dp": 2}))
    runs = run_of(parallel=tp2, history=4), run_of(parallel=dp2, history=2)
    for wanted, found in run_distributed(saved_and_loaded, 2, runs, tmp_path):
        assert found[1].keys() == wanted[1].keys()
        for name, scales in found[1].items():
            # its two steps; their largest weights are the same but for rounding
            assert scales.shape == (3, 3)
            torch.testing.assert_close(
                torch.from_numpy(scales[1, 1:]), torch.from_numpy(wanted[1][name][1, 1:3]),
                rtol=1e-2, atol=0.0,
            )  # fmt: skip


def from_other_recipe(rank: int, runs: tuple[Run, Run], folder: Path) -> tuple[Scales, bool]:
    first, second = (engine_of(run, rank) for run in runs)
    TrainingStep(first)(batches_of(runs[0], 0, 0), 1e-3, 0.1)
    path = save_checkpoint(folder, first, runs[0], Progress(1, 1, 0), {"sequences": 0})
    TrainingStep(second)(batches_of(runs[0], 0, 0), 1e-3, 0.1)
    load_checkpoint(path, read_manifest(path), second)
    return scales_of(second), second.capturable


def test_a_checkpoint_without_scales_begins_them_anew(tmp_path: Path):
    plain = make_run(DENSE, train=TWO_MICROBATCHES)
    assert run_distributed(from_other_recipe, 1, (plain, run_of()), tmp_path)[0] == ({}, False)
