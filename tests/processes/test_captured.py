"""Captured training equals eager training, on the stand-in that shares memory as pools of CUDA
graphs do.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from app.choices import (
    DispatcherKind,
    Dtype,
    GraphKey,
    Recompute,
    ScheduleName,
)
from app.config import (
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.engine.capture.facts import GraphFacts
from app.engine.files.run_folder import read_metrics
from app.engine.ranks.groups import process_world
from app.engine.run import validations
from app.engine.step.engine import Engine
from app.engine.step.executor import ForwardBackward
from app.engine.step.step import TrainingStep, Validation
from app.errors import ConfigError
from app.model.layers import layers, weight_grads
from app.moe.experts import Experts
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.forks import Patches
from tests.processes.captured import (
    CHOICES,
    EAGER,
    FOUR,
    FULL_ITERATIONS,
    LAYOUTS,
    MODELS,
    STEPS,
    WARMUP,
    WHOLE,
    broken,
    local,
    run_of,
    same,
    several,
    trained,
)
from tests.runs import batches_of, engine_of
from tests.training import composed, corpus_in, train_rank

# of tokens, for whose sizes the host waits
WITH_EXCHANGE = ("moe", "attn and moe", "layer", "layer by slot", *FULL_ITERATIONS)
SELECTED = (Recompute.attn_core, Recompute.norm, Recompute.mlp_act, Recompute.experts_act)


# two microbatches in flight have graphs in slots of their own
BY_SLOT = ("layer by slot", "partial by slot")
BIASED_TOO = ("one rank", "pp2")
CASES = [*itertools.product(LAYOUTS, ("moe", "dense")), *itertools.product(BIASED_TOO, ("biased",))]
CASES.remove(("ep2", "dense"))
QUICK = [("one rank", "moe"), ("pp2", "biased"), ("ep2", "moe")]


@pytest.mark.parametrize(("layout", "model"), chosen(CASES, QUICK))
def test_captured_training_equals_eager_training_bit_for_bit(layout: str, model: str):
    parallel, runs = LAYOUTS[layout], {}
    names = (
        CHOICES
        if layout in ("one rank", "pp2 vpp2")
        else (*BY_SLOT, "full iteration, update")
        if layout == "pp2"
        else ("partial", "layer", *FULL_ITERATIONS)
    )
    for name, graph in {"eager": EAGER, **{name: CHOICES[name] for name in names}}.items():
        try:
            runs[name] = run_of(
                MODELS[model],
                graph,
                parallel=parallel,
                optim=OptimConfig(lr=1e-2, bucket_numel=1500),
            )
        except ConfigError:  # an exchange of tokens is never captured
            if (model, name) == ("dense", "moe"):  # experts alone
                continue
            assert model == "moe" and layout in ("ep2", "tp2") and name in WITH_EXCHANGE
    for results in run_distributed(several, runs["eager"].world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
            assert result["facts"].count == (1 if name in FULL_ITERATIONS else result["planned"]), (
                name
            )
            assert result["facts"].count or name in ("mlp", "moe")  # a rank may have no such layers


@pytest.mark.full
@pytest.mark.parametrize(
    "slots", [True, False], ids=["two in flight in one slot", "slots in one pool"]
)
@pytest.mark.parametrize(
    "experts",
    chosen([False, True], [False]),
    ids=["dense", "experts on several ranks"],
)
def test_a_wrong_plan_gives_wrong_numbers(slots: bool, experts: bool):
    key = GraphKey.microbatch if slots else GraphKey.slot
    parallel = ParallelConfig(pp=2, ep=2, dp=2) if experts else LAYOUTS["pp2"]
    moe = dataclasses.replace(FOUR.moe, dispatcher=DispatcherKind.static) if experts else None
    # four microbatches: with two, parts would be replayed in the order of their capture
    train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=16 if experts else 8)
    runs = [
        run_of(dataclasses.replace(FOUR, moe=moe), graph, parallel=parallel, train=train)
        for graph in (EAGER, local("layer", key))
    ]
    eager = run_distributed(trained, runs[0].world_size, runs[0])
    if experts and not slots:  # what is read as rows of tokens lies outside of them
        with pytest.raises(AssertionError, match="out of bounds"):
            run_distributed(broken, runs[1].world_size, runs[1], slots)
        return
    wrong = run_distributed(broken, runs[1].world_size, runs[1], slots)
    assert not same(wrong[0], eager[0])
    captured = next(n for n in range(STEPS) if wrong[0]["seen"][n] != eager[0]["seen"][n])
    assert captured >= WARMUP


def memory_of(rank: int, runs: dict[int, Run]) -> dict[int, GraphFacts]:
    return {count: trained(rank, run)["facts"] for count, run in runs.items()}


@pytest.mark.full
@pytest.mark.parametrize("layout", chosen(["one rank", "pp2", "pp2 vpp2"], ["pp2"]))
def test_memory_does_not_grow_with_the_number_of_microbatches(layout: str):
    runs = {}
    for count in (4, 8):
        train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=2 * count)
        runs[count] = run_of(MODELS["moe"], local("partial"), parallel=LAYOUTS[layout], train=train)
    for facts in run_distributed(memory_of, runs[4].world_size, runs):
        sizes = [(found.static, found.cut, found.pool) for found in facts.values()]
        # The routers' reports of a step's microbatches stay until its end: a few numbers each.
        assert all(
            static == sizes[0][0] and cut + pool <= 1.01 * sum(sizes[0][1:])
            for static, cut, pool in sizes
        ), sizes


@pytest.mark.every(10)
@pytest.mark.parametrize("phases", [SELECTED, (Recompute.moe,)], ids=["several", "moe"])
@pytest.mark.parametrize("graph", ["partial", "attn", "layer", "full iteration"])
def test_recomputation_within_captured_parts(graph: str, phases: tuple[Recompute, ...]):
    again = RecomputeConfig(phases=phases)
    if graph == "partial" and Recompute.moe in phases:
        with pytest.raises(ConfigError, match=r"recompute\.phases"):
            run_of(FOUR, CHOICES[graph], recompute=again)
        return
    with process_world(0, 1, torch.device("cpu")):
        eager, captured = (
            trained(0, run_of(FOUR, chosen, recompute=again)) for chosen in (EAGER, CHOICES[graph])
        )
    assert same(captured, eager)


def test_what_follows_a_captured_part_is_recomputed_as_before(monkeypatch: pytest.MonkeyPatch):
    calls, forward = [], Experts.forward

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(0)
        return forward(*given, **named)

    monkeypatch.setattr(Experts, "forward", counted)
    run = run_of(FOUR, local("attn"), recompute=RecomputeConfig(phases=(Recompute.moe,)))
    with process_world(0, 1, torch.device("cpu")):
        engine, per_step = engine_of(run), []
        step = TrainingStep(engine)
        for n in range(STEPS):
            calls.clear()
            step(batches_of(run, n, 0), 0.0, 0.0)
            per_step.append(len(calls))
    # twice for each of three MoE layers and two microbatches
    assert per_step == [2 * 3 * 2] * STEPS


@pytest.mark.full
@pytest.mark.parametrize("dispatcher", [DispatcherKind.all_gather, DispatcherKind.all_to_all])
def test_experts_padded_are_captured_over_ranks(dispatcher: DispatcherKind):
    """Every size is known: no phase waits, also where the filled rows are as many as all
    choices.
    """
    moe = dataclasses.replace(
        FOUR.moe, capacity_factor=2.0, pad_to_capacity=True, dispatcher=dispatcher
    )
    model, parallel = dataclasses.replace(FOUR, moe=moe), LAYOUTS["ep2"]
    runs = {
        name: run_of(model, graph, parallel=parallel)
        for name, graph in (("eager", EAGER), ("layer", local("layer")))
    }
    for results in run_distributed(several, 2, runs):
        assert same(results["layer"], results["eager"])


def test_full_iteration_graph_with_full_recompute():
    with process_world(0, 1, torch.device("cpu")):
        runs = [
            run_of(FOUR, chosen, recompute=RecomputeConfig(full=True)) for chosen in (EAGER, WHOLE)
        ]
        eager, captured = (trained(0, run) for run in runs)
    assert same(captured, eager)


def test_padded_logits_are_captured():
    with process_world(0, 1, torch.device("cpu")):
        model = dataclasses.replace(FOUR, vocab_size=267)
        eager, captured = (trained(0, run_of(model, chosen)) for chosen in (EAGER, WHOLE))
    assert same(captured, eager)


def test_validation_is_captured_beside_training():
    run = run_of(FOUR, WHOLE)
    with process_world(0, 1, torch.device("cpu")):
        engine = engine_of(run)
        step, validation = TrainingStep(engine), Validation(engine, 1)
        plain = Validation(engine_of(dataclasses.replace(run, cuda_graph=EAGER)), 1)
        held_out, other = (batches_of(run, 100 + n, 0)[:1] for n in (0, 1))
        assert validation(held_out) == plain(held_out)
        for n in range(STEPS):
            step(batches_of(run, n, 0), 0.0, 0.0)
            assert validation(held_out) == plain(held_out)
        assert validation(other) == plain(other)  # the recording reads what it is given
        assert engine.recorder is not None and len(engine.recorder.recordings) == 2


def validated(rank: int, run: Run) -> list[str]:
    """Train, and tell how each validation of this process was run."""
    ways: list[str] = []

    class Told(Validation):
        def __init__(self, engine: Engine, num_microbatches: int) -> None:
            super().__init__(engine, num_microbatches)
            self.eager, self.captured = (
                telling("eager", self.eager),
                telling("captured", self.captured),
            )

    def telling(way: str, work: ForwardBackward) -> ForwardBackward:
        return lambda step: ways.append(way) or work(step)

    validations.Validation = Told
    assert train_rank(rank, run, {})[0]
    return ways


@pytest.mark.full
def test_a_resumed_run_validates_as_one_without_graphs(tmp_path: Path):
    settings = (*corpus_in(tmp_path), "checkpoint.interval=5")
    graphs = (
        *settings,
        "cuda_graph=full_iteration",
        "cuda_graph.warmup_steps=2",
        f"run_dir={tmp_path}/graphs",
    )
    starts = (
        (*settings, "train.steps=20", f"run_dir={tmp_path}/eager"),
        (*graphs, "train.steps=5"),
        (*graphs, "train.steps=20", "resume=auto"),
    )
    ways = [run_distributed(validated, 1, composed(overrides, 1))[0] for overrides in starts]
    assert ways == [["eager"] * 5, ["eager", "captured"], ["eager", "captured", "captured"]]
    eager, resumed = (
        [
            (row["step"], row["val_loss"])
            for row in read_metrics(tmp_path / name)
            if "val_loss" in row
        ]
        for name in ("eager", "graphs")
    )
    assert resumed == eager and [step for step, _ in eager] == [0, 5, 10, 15, 20]


# Triton's interpreter takes a hundredth of a second per kernel
TWO_MICROBATCHES = TrainConfig(steps=20, seq_len=8, micro_batch=1, global_batch=2)
DTYPES, DTYPE_NAMES = [Dtype.float32, Dtype.bfloat16], ["float32", "bfloat16"]
BESIDE = [
    *itertools.product(("moe", "dense"), ("partial", "full iteration", "layer")),
    ("moe", "moe"),
    ("dense", "mlp"),
]


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize(("model", "graph"), BESIDE)
def test_what_passes_a_norm_by_lies_in_graphs_where_it_did(
    model: str,
    graph: str,
    recomputed: bool,
    dtype: Dtype,
    monkeypatch: pytest.MonkeyPatch,
):
    """With the kernels of norms, which hand on what comes in as it is, and add the gradients of
    their weights to sums of more bits.
    """
    pytest.importorskip("triton")
    monkeypatch.setattr(layers, "usable", lambda *tensors: True)
    added, add = [], weight_grads.add_summed
    monkeypatch.setattr(
        weight_grads, "add_summed", lambda *given: (added.append(len(given)), add(*given))
    )
    again = RecomputeConfig(phases=(Recompute.norm,) if recomputed else ())
    small = {"precision": PrecisionConfig(dtype), "train": TWO_MICROBATCHES}
    two_layers = dataclasses.replace(MODELS[model], num_layers=2)
    runs = [
        run_of(two_layers, EAGER, **small),
        run_of(two_layers, EAGER, recompute=again, **small),
        run_of(two_layers, CHOICES[graph], recompute=again, **small),
    ]
    with process_world(0, 1, torch.device("cpu")):
        kept, eager, captured = (trained(0, run) for run in runs)
    assert same(captured, eager) and same(eager, kept)
    norms = 2 * two_layers.num_layers + 1
    least = 2 * STEPS * runs[0].num_microbatches * norms  # of eager steps alone
    assert len(added) >= least if dtype is Dtype.bfloat16 else not added


def several_with_kernels(rank: int, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    with Patches.context() as patch:
        patch.setattr(layers, "usable", lambda *tensors: True)
        return several(rank, runs)


@pytest.mark.full
@pytest.mark.parametrize("dtype", chosen(DTYPES, [Dtype.bfloat16]), ids=DTYPE_NAMES)
@pytest.mark.parametrize("model", chosen(("moe", "dense"), ["dense"]))
def test_norm_gradients_equal_for_every_backward(model: str, dtype: Dtype):
    """Whole, split, split in a graph, and with full recomputation."""
    pytest.importorskip("triton")
    split = ScheduleConfig(ScheduleName.zero_bubble_h1)
    two_layers = dataclasses.replace(MODELS[model], num_layers=2)
    small = {
        "parallel": LAYOUTS["pp2"],
        "precision": PrecisionConfig(dtype),
        "train": TWO_MICROBATCHES,
    }
    runs = {
        name: run_of(two_layers, graph, **small, **sections)
        for name, graph, sections in (
            ("whole", EAGER, {}),
            ("split", EAGER, {"schedule": split}),
            ("split in a graph", WHOLE, {"schedule": split}),
            ("again", EAGER, {"recompute": RecomputeConfig(full=True)}),
        )
    }
    for results in run_distributed(several_with_kernels, 2, runs):
        whole = results.pop("whole")
        assert [name for name, found in results.items() if same(found, whole)] == list(results)


def test_nothing_is_replayed_after_its_release():
    run = run_of(FOUR, local("layer"))
    with process_world(0, 1, torch.device("cpu")):
        engine = engine_of(run)
        step = TrainingStep(engine)
        for n in range(WARMUP + 1):
            step(batches_of(run, n, 0), 0.0, 0.0)
        engine.release()
        with pytest.raises(AssertionError, match="after its release"):
            step(batches_of(run, 0, 0), 0.0, 0.0)
