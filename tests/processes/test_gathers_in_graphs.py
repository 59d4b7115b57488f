"""A full-iteration graph gathers parameters itself, overlapped with its first forwards.

Replays in these tests do on the host what they do on a GPU: nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from app.choices import DispatcherKind, Dtype
from app.config import (
    CudaGraphConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    Run,
    TrainConfig,
)
from app.engine.capture.full_iteration import FullIteration
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.checkpoint.saver import Saver
from app.engine.decoding.generate import sample_tokens
from app.engine.files.checkpoints import CHECKPOINTS
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep, Validation
from app.model.chunk import Chunk
from app.optim import param_gather
from app.optim.adam import AdamShard
from app.optim.param_gather import ParamGather
from tests.cases import chosen
from tests.checkpoints import verify_checkpoint
from tests.distributed import run_distributed
from tests.processes.captured import EAGER, FOUR, UPDATING, WARMUP, WHOLE
from tests.processes.gathers_in_graphs import replays_as_on_a_gpu
from tests.runs import batches_of, engine_of, make_run, whole_parameters

DENSE = dataclasses.replace(FOUR, moe=None)
TWO = dataclasses.replace(DENSE, num_layers=2)
STATIC = dataclasses.replace(FOUR.moe, dispatcher=DispatcherKind.static)
# fp16: the first updates are skipped
SKIPS = PrecisionConfig(Dtype.float16, initial_loss_scale=2.0**22, loss_scale_hysteresis=1)
CASES: dict[str, dict[str, Any]] = {
    "dp2": {"model": TWO, "parallel": ParallelConfig(dp=2)},
    "dp2, experts": {"parallel": ParallelConfig(dp=2)},
    "dp2 pp2 vpp2": {"parallel": ParallelConfig(dp=2, pp=2, vpp=2)},
    "dp4 ep2": {
        "model": dataclasses.replace(FOUR, moe=STATIC),
        "parallel": ParallelConfig(dp=4, ep=2),
        "train": TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=16),
    },
    "dp2 tp2": {"model": DENSE, "parallel": ParallelConfig(dp=2, tp=2)},
    "dp2 pp2, tied": {
        "model": dataclasses.replace(DENSE, tie_embeddings=True),
        "parallel": ParallelConfig(dp=2, pp=2),
    },
    "dp2, skipped updates": {
        "model": TWO,
        "parallel": ParallelConfig(dp=2),
        "precision": SKIPS,
    },
    "one rank": {"parallel": ParallelConfig()},
}
STEPS, SAVED = 6, 3


def run_of(case: str, graph: CudaGraphConfig, overlap: bool) -> Run:
    # both overlaps off would make other buckets
    optim = OptimConfig(lr=1e-2, warmup_steps=2, bucket_numel=1500, overlap_params=overlap)
    return make_run(**{"model": FOUR, "optim": optim, "cuda_graph": graph, **CASES[case]})


def taken(engine: Engine, first: int, saver: Saver | None, folder: Path) -> list[Any]:
    """Return the results of steps from the `first` on, with validations between them.

    Then those of a sample, and the parameters.
    """
    run, told, updates = engine.plan.run, [], 0
    step, validation = TrainingStep(engine), Validation(engine, 2)
    with replays_as_on_a_gpu(engine):
        for n in range(first, STEPS):
            if saver is not None and n == SAVED:
                saver.save(folder / CHECKPOINTS, Progress(n, updates, n), {"sequences": 0})
            batches = batches_of(run, n, engine.groups.dp_rank)
            facts, _ = step(batches, 1e-2 / (1 + n), 0.1 * (1 + n))
            updates += 1 - int(facts.skipped)
            told.append((n, facts.loss, repr(facts.grad_norm), facts.skipped))  # nan is not nan
            for _ in range((0, 1, 0, 2)[n % 4]):  # one behind the other too
                held_out = batches_of(run, 100 + n, engine.groups.dp_rank)[:2]
                told.append((n, validation(held_out)))
        vocab = run.model.vocab_size
        told.append((STEPS, list(sample_tokens(engine, [1, 2], 3, window=8, vocab=vocab, seed=1))))
    told.append(
        (STEPS, {name: value.numpy().tobytes() for name, value in whole_parameters(engine).items()})
    )
    return told


def history(rank: int, run: Run, folder: Path) -> dict[str, Any]:
    """Train a run, and resume it from its checkpoint in another process."""
    engine = engine_of(run, rank)
    saver = Saver(engine, lambda: None)
    through = taken(engine, 0, saver, folder)
    saver.wait()
    captured = engine.recorder is not None and len(engine.recorder.recordings)
    engine.release()
    fresh = engine_of(run, rank)
    (path,) = (folder / CHECKPOINTS).glob("step-*")
    load_checkpoint(path, verify_checkpoint(path), fresh)
    resumed = taken(fresh, SAVED, None, folder)
    fresh.release()
    return {"through": through, "resumed": resumed, "captured": captured}


def histories(rank: int, runs: dict[str, Run], folder: Path) -> dict[str, dict[str, Any]]:
    return {name: history(rank, run, folder / name) for name, run in runs.items()}


HISTORIES = {  # graphs, and whether gathers run beside the step
    "eager": (EAGER, True),
    "whole, before": (WHOLE, False),
    "whole with its update, beside": (UPDATING, True),
    "whole, beside": (WHOLE, True),
    "whole with its update, before": (UPDATING, False),
}
GATHERS_QUICK = [("dp2, skipped updates", 3)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "count"),
    chosen([*GATHERS_QUICK, *((case, len(HISTORIES)) for case in CASES)], GATHERS_QUICK),
)
def test_captured_equals_eager_wherever_parameters_are_gathered(
    case: str, count: int, tmp_path: Path
):
    """Either graph, with gathers before and beside the step."""
    runs = {name: run_of(case, *HISTORIES[name]) for name in [*HISTORIES][:count]}
    world = runs["eager"].world_size
    for found in run_distributed(histories, world, runs, tmp_path):
        expected = found["eager"]["through"]
        for name, told in found.items():
            assert told["captured"] == (2 if "whole" in name else False), name  # steps, validations
            assert told["through"] == expected, name
            assert told["resumed"] == [row for row in expected if row[0] >= SAVED], name
        skipped = [row[3] for row in expected if len(row) == 4]
        assert any(skipped) == ("skipped" in case) and not all(skipped)


class Watched:
    """Gathers, first waits for them, forwards, updates and calls of what is recorded, in turn."""

    def __init__(self, engine: Engine) -> None:
        self.events: list[tuple[str, Any]] = []
        shards = engine.optimizer._in_use_order
        number = {shard.params.data_ptr(): place for place, shard in enumerate(shards)}
        all_gather, wait_for = param_gather.all_gather, ParamGather.wait
        forward, update, call = Chunk.__call__, AdamShard.update, FullIteration.__call__

        def on_gather(output: Tensor, *given: Any, wait: bool = True) -> Any:
            self.events.append(("gather" if wait else "start", number[output.data_ptr()]))
            return all_gather(output, *given, wait=wait)

        def on_wait(gather: ParamGather, shard: AdamShard) -> None:
            if shard in gather._in_flight:
                self.events.append(("wait", number[shard.params.data_ptr()]))
            wait_for(gather, shard)

        def on_forward(chunk: Chunk, *given: Any) -> Any:
            self.events.append(("forward", engine.chunks.index(chunk)))
            return forward(chunk, *given)

        def on_update(shard: AdamShard, *given: Any, **named: Any) -> None:
            self.events.append(("update", number[shard.params.data_ptr()]))
            update(shard, *given, **named)

        def on_call(work: FullIteration[Any], *given: Any) -> Any:
            self.events.append(("begins", None))
            found = call(work, *given)
            self.events.append(("ends", None))
            return found

        # this process is about to end
        param_gather.all_gather, ParamGather.wait = on_gather, on_wait
        Chunk.__call__, AdamShard.update, FullIteration.__call__ = on_forward, on_update, on_call

    def take(self) -> list[tuple[str, Any]]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events


def watch(rank: int, run: Run) -> dict[str, Any]:
    """Events of every step and validation, and in which chunk each bucket is."""
    engine = engine_of(run, rank)
    watched, told = Watched(engine), []
    step, validation = TrainingStep(engine), Validation(engine, 2)
    for n in range(WARMUP + 3):
        step(batches_of(run, n, engine.groups.dp_rank), 1e-2, 0.1)
        told.append(watched.take())
        # the one in front of the recording leaves everything gathered
        validation(batches_of(run, 100 + n, engine.groups.dp_rank)[:2])
        told.append(watched.take())
    chunk_of = [chunk for chunk, shards in enumerate(engine.optimizer.shards) for _ in shards]
    engine.release()
    return {"told": told, "chunk_of": chunk_of}


def places(events: list[tuple[str, Any]], *kinds: str) -> list[int]:
    return [place for place, (kind, _) in enumerate(events) if kind in kinds]


def numbers(events: list[tuple[str, Any]], kind: str) -> list[int]:
    return [number for each, number in events if each == kind]


@pytest.mark.every(2)
@pytest.mark.parametrize("graph", [WHOLE, UPDATING], ids=["passes", "with the update"])
@pytest.mark.parametrize("overlap", [True, False], ids=["beside", "before"])
@pytest.mark.parametrize("case", chosen(["dp2", "dp2 pp2 vpp2"], ["dp2"]))
def test_captured_step_gathers_in_order_of_use(case: str, overlap: bool, graph: CudaGraphConfig):
    run = run_of(case, graph, overlap)
    for found in run_distributed(watch, run.world_size, run):
        chunk_of, told = found["chunk_of"], found["told"]
        buckets = list(range(len(chunk_of)))
        assert len(buckets) > 4
        # the first validation of a process is never captured
        for events in told[2 * WARMUP :]:
            begins, ends = places(events, "begins")[0], places(events, "ends")[0]
            gathers, forwards = places(events, "start", "gather"), places(events, "forward")
            assert begins < gathers[0] and gathers[-1] < ends
            assert numbers(events, "update") in ([], buckets)
            inside = [begins < place < ends for place in places(events, "update")]
            assert all(each == graph.optimizer for each in inside)
            if overlap:
                assert not numbers(events, "gather") and gathers[-1] < forwards[0]
                assert numbers(events, "start") == numbers(events, "wait") == buckets
                waits = places(events, "wait")
                for chunk in set(chunk_of):
                    begun = forwards[numbers(events, "forward").index(chunk)]
                    own = [waits[number] for number in buckets if chunk_of[number] == chunk]
                    assert all(place > begun for place in own), "by its own gates"
                assert waits[-1] < ends
                continue
            assert not numbers(events, "start") and not numbers(events, "wait")
            assert sorted(numbers(events, "gather")) == buckets
            for chunk in set(chunk_of):
                begun = forwards[numbers(events, "forward").index(chunk)]
                of_chunk = [place for place in gathers if chunk_of[events[place][1]] == chunk]
                assert all(place < begun for place in of_chunk)
        # an eager one after it finds everything gathered
        eager = told[2 * WARMUP - 1]
        assert not places(eager, "begins") and not places(told[1], "begins")
