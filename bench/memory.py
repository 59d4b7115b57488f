"""The planned memory of a run against what a GPU says, part by part; or the size of CUDA graphs.

    python bench/memory.py [overrides …]                            one GPU
    torchrun --nproc-per-node N bench/memory.py [overrides …]       several; rank 0 speaks
    python bench/memory.py --graphs 64 [overrides …]                bytes per graph and per kernel
    in it

The first builds the engine, runs one forward and trains three steps on random tokens; the second
captures forwards of one and of four layers of the model and solves for both figures. Prints one
line of JSON; sizes are MiB. What a process takes after its context is made is NCCL's, and kernels'
that are loaded when they are first used.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from app.cli.options.compose import load_overrides
from app.cli.processes.launcher import Launch
from app.config import Run
from app.data.feed import Batch
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep
from app.plan.memory.overheads import MIB
from app.plan.memory.rank_memory import OUTSIDE, RankMemory
from app.plan.recompute import RecomputeChoice
from app.planner.plan import Plan

STEPS = 3
STATE = ("parameters", "gradients", "optimizer")
LAYERS = (1, 4)  # captured per graph


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--graphs", type=int, default=0, help="graphs to capture; 0: measure training"
    )
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    args = parser.parse_args()
    launch = Launch.from_environment(os.environ)
    run = load_overrides(args.overrides, launch.world_size)
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream())
    measure = measure_graphs if args.graphs else measure_training
    result = measure(Plan(run), launch.rank, device, args.graphs)
    if launch.rank == 0:
        versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        print(json.dumps({"overrides": args.overrides, **versions, **result}))


def measure_training(plan: Plan, rank: int, device: torch.device, _: int) -> dict[str, Any]:
    """Parts of a training run, planned and measured."""
    torch.zeros(1, device=device)
    context, run = outside(), plan.run
    with process_world(rank, run.world_size, device):
        groups = create_groups(plan.layout, rank)
        engine = build_engine(plan, groups, device)
        held = torch.cuda.memory_allocated()
        kept = kept_by_forward(engine, device) if run.parallel.pp == 1 else None
        torch.cuda.reset_peak_memory_stats()
        step = TrainingStep(engine)
        for _ in range(STEPS):
            step(
                [random_batch(run) for _ in range(run.num_microbatches)],
                run.optim.lr,
                run.optim.weight_decay,
            )
        torch.cuda.synchronize()
        measured = {
            "state": held,
            "kept": kept,
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "context": context,
            "after_context": outside() - context,
        }
        memory = plan.memory[groups.pp_rank]
        return comparison(memory, measured)


def comparison(memory: RankMemory, measured: dict[str, int | None]) -> dict[str, Any]:
    """Planned and measured MiB side by side, and the parts of the plan."""
    size = {part.name: part.bytes for part in memory.parts}
    planned = {
        "state": sum(size[name] for name in STATE),
        "kept": size.get("activations"),
        "peak": memory.allocated,
        "reserved": memory.allocated + size["fragmentation"],
        "context": size["CUDA context"],
        "after_context": size.get("NCCL", 0) + size.get("graph objects", 0),
    }
    return {
        "planned_measured_mib": {
            name: [mib(planned[name]), mib(measured[name])] for name in planned
        },
        "peak_ratio": round(memory.allocated / (measured["peak"] or 1), 4),
        "planned_parts_mib": {
            name: mib(value) for name, value in size.items() if name not in OUTSIDE
        },
    }


def mib(value: int | None) -> float | None:
    """MiB with one decimal."""
    return None if value is None else round(value / MIB, 1)


def outside() -> int:
    """Bytes of the GPU that are in use, but not by torch's allocator; other processes on it
    count as well.
    """
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def random_batch(run: Run) -> Batch:
    """Uniform tokens."""
    size, length = run.train.micro_batch, run.train.seq_len
    rows = torch.randint(0, run.model.vocab_size, (size, length + 1))
    return Batch(
        rows[:, :-1].contiguous(),
        rows[:, 1:].contiguous(),
        torch.arange(length).repeat(size, 1),
        ends_BD=None,
    )


def kept_by_forward(engine: Engine, device: torch.device) -> int:
    """What autograd keeps of one microbatch from forward to backward."""
    (chunk,), run = engine.chunks, engine.plan.run
    batch = random_batch(run)
    tokens, labels, positions = (
        tensor.to(device) for tensor in (batch.tokens_BS, batch.labels_BS, batch.positions_BS)
    )
    kept = 0
    for _ in range(2):  # the first time, libraries allocate their workspaces
        before = torch.cuda.memory_allocated()
        again = RecomputeChoice(whole_layers=run.recompute.full)
        context = chunk.context(positions, None, recompute=again)
        out = chunk(tokens, context)
        loss = chunk.loss(out.x, labels, context)
        root = sum((report.loss for report in out.routing if report.loss.requires_grad), loss)
        del out
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        del root, loss
    return kept


def measure_graphs(plan: Plan, rank: int, device: torch.device, count: int) -> dict[str, Any]:
    """Bytes per graph and per kernel, from graphs of one and of four forwards of a layer."""
    run = plan.run
    with process_world(rank, 1, device):
        chunk = build_engine(plan, create_groups(plan.layout, rank), device).chunks[0]
        layer = next(iter(chunk.layers.values()))
        batch = random_batch(run)
        context = chunk.context(batch.positions_BS.to(device), None)
        x = torch.randn(
            run.train.micro_batch, run.train.seq_len, run.model.hidden_size, device=device
        ).to(layer.attn.wo.weight.dtype)
        found = [
            captured(lambda layers=layers: forwards(layer, x, context, layers=layers), count)
            for layers in LAYERS
        ]
    (small, few), (large, many) = found
    per_kernel = (large - small) / max(1, many - few)
    return {
        "graphs": count,
        "kernels": [few, many],
        "bytes_per_graph_of": [round(small), round(large)],
        "bytes_per_kernel": round(per_kernel),
        "bytes_per_graph": round(small - per_kernel * few),
    }


@torch.no_grad()
def forwards(layer: nn.Module, x: Tensor, context: Any, layers: int) -> Tensor:
    """The layer, `layers` times one after another."""
    for _ in range(layers):
        x, _ = layer(x, context)
    return x


def captured(work: Callable[[], Tensor], count: int) -> tuple[float, int]:
    """(driver's bytes per graph, kernels in it) of `count` graphs that share one pool."""
    work()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    kernels = sum(
        event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events()
    )
    pool, graphs = torch.cuda.graph_pool_handle(), []
    before = outside()
    for _ in range(count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            work()
        graph.replay()
        graphs.append(graph)
    used = outside() - before
    for graph in graphs:
        graph.reset()
    return used / count, kernels


if __name__ == "__main__":
    main()
