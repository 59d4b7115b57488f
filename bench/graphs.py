"""CUDA graphs against eager execution: the same numbers, as many graphs and bytes as planned, and
what a wrong plan does.

    python bench/graphs.py [--steps 120] [--json FILE] dense/layer moe/partial …
    torchrun --nproc-per-node 2 bench/graphs.py pp2-moe/layer pp2vpp2-dense/full_iteration …

    # captured by Transformer Engine, with one GPU and with two
    python bench/graphs.py moe/partial,cuda_graph.impl=transformer_engine
    torchrun --nproc-per-node 2 bench/graphs.py pp2-moe/partial,cuda_graph.impl=transformer_engine

    # many buckets of parameters, gathered beside the first forwards, or before them
    torchrun --nproc-per-node 2 bench/graphs.py \\
        dp2-dense/full_iteration,optim.bucket_numel=100000 \\
        dp2-moe/full_iteration,optim.bucket_numel=100000,optim.overlap_params=false

    # what the watchdog's marks cost
    python bench/graphs.py --marks --steps 400 dense/full_iteration moe/partial

    # the update in the graph of a step
    torchrun --nproc-per-node 2 bench/graphs.py pp2-moe/full_iteration,cuda_graph.optimizer=true

A case is MODEL/GRAPHS, with more overrides behind a comma: moe/partial,train.global_batch=32. Each
trains the same steps twice eagerly and once with graphs, on sequences that can be learnt. Printed,
one line of JSON per case: the largest difference of losses, gradient norms and final parameters,
with routers' biases, between graphs and eager, and between the two eager runs; graphs and memory
beside the plan's; step times. --break makes the plan wrong: pools has the slots of
cuda_graph.key=slot share one pool, which must give other numbers; slots gives two microbatches in
flight the same slot, which autograd notices when it is recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.cli.options.compose import load_overrides
from app.cli.processes.launcher import Launch
from app.config import Run
from app.data.feed import Batch
from app.engine.build import build_engine
from app.engine.capture.facts import GraphFacts
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep
from app.engine.watchdog.watchdog import Watchdog
from app.plan.graphs import GraphPlan
from app.planner.plan import Plan

COMMON = (
    "precision=bf16",
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.vocab_size=512",
    "train.seq_len=256",
    "train.micro_batch=2",
    "train.global_batch=16",
    "optim.lr=3e-3",
    "optim.warmup_steps=10",
    "optim.decay_steps=1000",
    "train.steps=1000",
    "data.tokenizer=bytes",
)
MOE = (
    "model.moe.num_experts=16",
    "model.moe.top_k=4",
    "model.moe.ffn_hidden_size=128",
    "model.moe.shared_ffn_hidden_size=256",
    "model.moe.shared_gate=true",
    "model.moe.z_loss_coeff=0.001",
)
MODELS: dict[str, tuple[str, ...]] = {
    "dense": ("model=dense_tiny", "model.ffn_hidden_size=512"),
    "moe": ("model=moe_tiny", *MOE),
    "jitter": ("model=moe_tiny", *MOE, "model.moe.jitter_eps=0.01"),
    # multi-head latent attention of DeepSeek-V2's widths
    "latent": (
        "model=deepseek_v2_lite",
        *MOE,
        "model.num_kv_heads=4",
        "model.ffn_hidden_size=512",
        "model.mla.kv_lora_rank=128",
    ),
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "": (),
    "pp2": ("parallel.pp=2",),
    "pp2vpp2": ("parallel.pp=2", "parallel.vpp=2"),
    "dp2": ("parallel.dp=2",),
    "ep2": ("parallel.ep=2",),
    "tp2": ("parallel.tp=2", "parallel.etp=1", "parallel.ep=2"),
}


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path, help="write the lines there too")
    parser.add_argument(
        "--break", dest="mutation", choices=("slots", "pools"), help="make the plan wrong"
    )
    parser.add_argument(
        "--marks", action="store_true", help="train once more with the watchdog's marks"
    )
    parser.add_argument("cases", nargs="+", help="[LAYOUT-]MODEL/GRAPHS[,override …]")
    args = parser.parse_args()
    launch = Launch.from_environment(os.environ)
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream())
    eager: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    with process_world(launch.rank, launch.world_size or 1, device):
        for case in args.cases:
            chosen, graphs = overrides_of(case)
            if chosen not in eager:
                eager[chosen] = [
                    train([*chosen, "cuda_graph=none"], launch, device, steps=args.steps)
                    for _ in range(2)
                ]
            captured = train(
                [*chosen, *graphs], launch, device, steps=args.steps, mutation=args.mutation
            )
            found = compare(captured, *eager[chosen])
            if args.marks:
                marked = train([*chosen, *graphs], launch, device, steps=args.steps, marks=True)
                found |= cost_of_marks(captured, marked)
            line = json.dumps({"case": case, "break": args.mutation, **found})
            if launch.rank == 0:
                print(line, flush=True)
                if args.json:
                    with args.json.open("a") as file:
                        file.write(line + "\n")


def overrides_of(case: str) -> tuple[tuple[str, ...], list[str]]:
    """What a case sets for both, and for the run with graphs."""
    head, *more = re.split(r",(?![^[]*\])", case)  # not inside of a list
    model, graphs = head.split("/")
    layout, _, model = model.rpartition("-")
    ours = [one for one in more if one.startswith("cuda_graph")]
    others = tuple(one for one in more if not one.startswith("cuda_graph"))
    return (*COMMON, *MODELS[model], *LAYOUTS[layout], *others), [f"cuda_graph={graphs}", *ours]


def train(
    overrides: list[str],
    launch: Launch,
    device: torch.device,
    steps: int,
    mutation: str | None = None,
    marks: bool = False,
) -> dict[str, Any]:
    """One run, from nothing to nothing: what it computed, and what it took."""
    # of streams of runs before this one; no graph lives that would read them
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(launch.rank)
    words = [*overrides, "cuda_graph.marks=true"] if marks else overrides
    plan = Plan(load_overrides(words, launch.world_size))
    watchdog = Watchdog(launch.rank, plan.run.schedule.timeout_s) if marks else None
    groups = create_groups(plan.layout, launch.rank)
    engine = build_engine(plan, groups, device, watchdog=watchdog)
    with engine.watchdog.running():
        try:
            return measure(engine, steps, mutation)
        finally:
            engine.release()
            del engine
            gc.collect()


def measure(engine: Engine, steps: int, mutation: str | None) -> dict[str, Any]:
    """Losses, norms and parameters, step times, and what the graphs are."""
    run, step = engine.plan.run, TrainingStep(engine)
    if mutation:
        spoil(step, mutation)
    seen, times, allocated = [], [], []
    for n in range(steps):
        began = time.perf_counter()
        facts, _ = step(
            batches_of(run, n, engine.groups.dp_rank), run.optim.lr, run.optim.weight_decay
        )
        times.append((time.perf_counter() - began) * 1e3)
        seen.append((facts.loss, facts.grad_norm))
        allocated.append(torch.cuda.memory_allocated())
    rank = engine.groups.pp_rank
    peak, planned = torch.cuda.max_memory_allocated(), engine.plan.memory[rank]
    engine.gather_all_params()
    state = [
        tensor for chunk in engine.chunks for tensor in (*chunk.parameters(), *chunk.buffers())
    ]
    found = {
        "seen": seen,
        "params": [tensor.detach().float().cpu() for tensor in state],
        "step_ms": round(statistics.median(times[steps // 2 :]), 2),
        "peak_mib": round(peak / 2**20, 1),
        "planned_mib": round(planned.allocated / 2**20, 1),
        "grown_mib": round((allocated[-1] - allocated[steps // 2]) / 2**20, 3),
    }
    if engine.watchdog.marks is not None:
        replays = steps - run.cuda_graph.warmup_steps
        found["marks"] = engine.watchdog.marks.passed() / replays
    if engine.recorder is not None:
        facts = GraphFacts.of(engine.recorder)
        graphs = engine.plan.graphs[rank]
        found["graphs"] = {
            "planned": graphs.num_graphs if graphs else 1,
            **dataclasses.asdict(facts),
        }
        found["planned_parts_mib"] = {
            part.name: round(part.bytes / 2**20, 2) for part in planned.parts
        }
    return found


def spoil(step: TrainingStep, mutation: str) -> None:
    """Replace the plan of partial graphs by a wrong one."""
    stages = step.captured.args[0].args[1].args[1]  # of the executor bound to the captured step
    plan: GraphPlan = stages.graphs.plan
    if mutation == "slots":
        wrong = dataclasses.replace(plan, slots=dict.fromkeys(plan.slots, 0))
    else:
        wrong = dataclasses.replace(plan, pool_per_slot=False)
    stages.graphs.plan = wrong


def compare(
    captured: dict[str, Any], first: dict[str, Any], second: dict[str, Any]
) -> dict[str, Any]:
    """Differences over all ranks, and this rank's facts."""
    apart = {"graph": differences(captured, first), "eager": differences(second, first)}
    largest = torch.tensor([[*values.values()] for values in apart.values()], device="cuda")
    if dist.get_world_size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    for values, row in zip(apart.values(), largest.tolist(), strict=True):
        values.update(zip(values, row, strict=True))
    facts = {key: value for key, value in captured.items() if key not in ("seen", "params")}
    times = {"eager_ms": first["step_ms"], "eager_peak_mib": first["peak_mib"]}
    return {"loss": [captured["seen"][0][0], captured["seen"][-1][0]], **apart, **facts, **times}


def cost_of_marks(captured: dict[str, Any], marked: dict[str, Any]) -> dict[str, Any]:
    """Marks per step and their share of its time; whether losses and norms are the same bits."""
    return {
        "marks": marked["marks"],
        "marked_ms": marked["step_ms"],
        "marks_share": round(marked["step_ms"] / captured["step_ms"] - 1, 5),
        "marks_equal": marked["seen"] == captured["seen"],
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Largest ones; not a number counts as infinity."""
    losses, norms = (
        [abs(a[n] - b[n]) for a, b in zip(one["seen"], other["seen"], strict=True)] for n in (0, 1)
    )
    params = [
        float((a - b).abs().max()) for a, b in zip(one["params"], other["params"], strict=True)
    ]
    found = {"loss": losses, "norm": norms, "params": params}
    return {
        name: max(value if value == value else float("inf") for value in values)
        for name, values in found.items()
    }


def batches_of(run: Run, step: int, dp_rank: int) -> list[Batch]:
    """Microbatches of counting up by a fixed number, which a model soon learns to continue."""
    size, length, found = run.train.micro_batch, run.train.seq_len, []
    for mb in range(run.num_microbatches):
        generator = torch.Generator().manual_seed(1000 * step + mb * run.dp + dp_rank)
        start, stride = (
            torch.randint(0, high, (size, 1), generator=generator)
            for high in (run.model.vocab_size, 4)
        )
        rows = (start + (stride + 1) * torch.arange(length + 1)) % run.model.vocab_size
        found.append(
            Batch(
                rows[:, :-1].contiguous(),
                rows[:, 1:].contiguous(),
                torch.arange(length).repeat(size, 1),
                ends_BD=None,
            )
        )
    return found


if __name__ == "__main__":
    main()
