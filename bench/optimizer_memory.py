"""Bytes that parameters, gradients and optimizer hold after an update, per parameter, on 1, 2 and 4
processes.

    python bench/optimizer_memory.py

On CPU, over gloo. Measured are all distinct storages that a rank's parameters, their gradients and
its shards refer to, apart for dense parameters (shared by d = dp ranks) and for routed experts (d =
edp). Beside them: the figures of ZeRO stage 1 with an fp32 gradient kept for the update, and those
of the plan, which counts padding. Prints one line each and writes
bench/results/optimizer_memory.json; fails where a rank holds more than it says.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from app.cli.options.compose import load_overrides
from app.config import Run
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.engine import Engine
from app.kernels.adamw import update_rates
from app.optim.adam import AdamShard
from app.plan.memory.rank_memory import bytes_per_parameter
from app.planner.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
# Name -> overrides, and bytes per parameter: of every rank, and shared by d of them.
PRECISIONS = {
    "bf16, gradients in bf16": (("precision=bf16", "precision.grads=bfloat16"), 4, 16),
    "bf16, gradients in fp32": (("precision=bf16",), 6, 12),
    "fp32": (("precision=fp32",), 8, 8),
}
# several buckets, each with its padding
SMALL = ("train.micro_batch=1", "optim.bucket_numel=100000")
# Kind -> overrides that share it between d ranks. Experts are on 4 ranks each time.
KINDS = {
    "dense": {
        d: ("model=dense_tiny", "model.qk_norm=true", f"parallel.dp={d}", *SMALL) for d in (1, 2, 4)
    },
    "experts": {
        d: ("model=moe_tiny", "parallel.dp=4", f"parallel.ep={4 // d}", *SMALL) for d in (1, 2, 4)
    },
}


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of one kind of parameter."""

    parameters: int  # elements
    padded: int  # the same with the padding of the buffers
    storages: int  # bytes of all distinct storages but those of step counts
    step_counts: int  # bytes: 4 for each part of a parameter that this rank updates


def main() -> None:
    """Measure, compare, print and save."""
    rows = []
    print(
        f"{'':34} d   parameters   padding   measured      table       plan   bytes per parameter"
    )
    for kind, sizes in KINDS.items():
        for name, (precision, whole, shared) in PRECISIONS.items():
            for d, overrides in sizes.items():
                run = load_overrides([*overrides, *precision])
                held = max(
                    measure_all(run, kind == "experts"),
                    key=lambda rank: rank.storages + rank.step_counts,
                )
                params, grads, owned = bytes_per_parameter(run.precision)
                row = {
                    "kind": kind,
                    "precision": name,
                    "d": d,
                    **asdict(held),
                    "measured": round((held.storages + held.step_counts) / held.parameters, 4),
                    "table": whole + shared / d,
                    "plan": params + grads + owned / d,
                }
                assert held.storages == (params + grads) * held.padded + owned * held.padded // d, (
                    row
                )
                assert held.storages <= (whole + shared / d) * held.padded, row
                rows.append(row)
                padding = held.padded - held.parameters
                numbers = (
                    f"{held.parameters:12,} {padding:9,} {row['measured']:10.3f} "
                    f"{row['table']:10.3f} {row['plan']:10.3f}"
                )
                print(f"{f'{kind}, {name}':34} {d} {numbers}", flush=True)
    path = ROOT / "bench" / "results" / "optimizer_memory.json"
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def measure_all(run: Run, experts: bool) -> list[Held]:
    """What every rank of the run holds, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    found: SimpleQueue[Held] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (
            (run, experts, rank, f"{folder}/store", found) for rank in range(run.world_size)
        )
        ranks = [context.Process(target=measure, args=each) for each in arguments]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a process has failed")
    return [found.get() for _ in ranks]


def measure(run: Run, experts: bool, rank: int, store: str, found: SimpleQueue[Held]) -> None:
    """Update once as one rank, and hand over what it holds then."""
    torch.set_num_threads(1)  # the parent's threads are not in a forked process
    with process_world(rank, run.world_size, CPU, store=dist.FileStore(store, run.world_size)):
        plan = Plan(run)
        engine = build_engine(plan, create_groups(plan.layout, rank), CPU)
        update(engine)
        found.put(
            held_by(
                [
                    shard
                    for shard in engine.optimizer.shards[0]
                    if shard.buffer.specs[0].expert == experts
                ]
            )
        )


def update(engine: Engine) -> None:
    """One update with gradients of one: what is taken when it is first needed has then been
    taken.
    """
    optimizer = engine.optimizer
    optimizer.zero_grad()
    optimizer.expect_grads(0, last=True)
    sum(param.float().sum() for param in engine.chunks[0].parameters()).backward()
    optimizer.reduce_grads(0)
    optimizer.finish_grads()
    optimizer.step(update_rates(1e-3, 0.1, engine.device), optimizer.local_norm_sq().sqrt())
    optimizer.gather_params(0)


def held_by(shards: list[AdamShard]) -> Held:
    """Everything that these shards, their parameters and their gradients refer to."""
    specs = list(dict.fromkeys(spec.param for shard in shards for spec in shard.buffer.specs))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors(shards)
    }
    counts = {
        piece.step.data_ptr(): piece.step.nbytes for shard in shards for piece in shard.param_shards
    }
    padded = {id(shard.buffer): shard.buffer.layout.numel for shard in shards}
    return Held(
        sum(param.numel() for param in specs),
        sum(padded.values()),
        sum(storages.values()),
        step_counts=sum(counts.values()),
    )


def tensors(shards: list[AdamShard]) -> Iterator[Tensor]:
    """All tensors but the step counts, views and what they are views of alike."""
    for shard in shards:
        yield from (
            shard.buffer.params,
            shard.buffer.grads,
            shard.params,
            shard.own_params,
            shard.grad,
        )
        yield from (shard.main, shard.exp_avg, shard.exp_avg_sq)
        for piece in shard.param_shards:
            yield from (piece.grad, *piece.state.values())
        for spec in shard.buffer.specs:
            yield spec.param.detach()
            if spec.param.grad is not None:
                yield spec.param.grad


if __name__ == "__main__":
    main()
