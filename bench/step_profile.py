"""Where the time of a training step goes: kernels by kind, and the gaps between them.

    python bench/step_profile.py [--steps 8] [--top 12] [--json FILE] overrides … [/ overrides …]

`/` separates runs. Each trains on random tokens; the last step is traced. Printed per run: the
step's time without the trace, the share of each kind of kernel in rank 0's traced step, the largest
kernels by name, the time in which none ran, and the ms of each rank's kernels without collectives.

`hot=4:2.8` among the overrides adds 2.8 to the routers' scores of the first 4 experts of each MoE
layer, which all lie on the first expert-parallel rank: tokens then go there as they do where a
router has come to prefer few experts. Printed besides, as in metrics.jsonl: how many rows the
busiest rank has, and with clones of hot experts how many it computes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from layouts import batches_of, merged
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from app.cli.options.compose import load_overrides
from app.cli.processes.launcher import Launch
from app.collectives import all_reduce
from app.config import Run
from app.engine.build import build_engine
from app.engine.capture.facts import GraphFacts
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.engine import Engine
from app.engine.step.records import StepReport
from app.engine.step.step import TrainingStep
from app.moe import phases
from app.plan.cost.flops import flops_per_token
from app.planner.plan import Plan

KINDS = {  # of kernels, by a part of their names; the first that fits counts
    "exchange": ("nccl",),
    "attention": ("flash", "fmha", "cudnn_generated", "sdpa", "matmul_dq", "attention"),
    "optimizer": ("adam", "FusedAdam", "multi_tensor"),
    "loss": ("_statistics", "_into_gradient", "cross_entropy"),
    "rows of experts": (
        "_spread",
        "_sum_rows",
        "_gradients",
        "indexSelect",
        "index_select",
        "vectorized_gather",
    ),
    "routing": (
        "ort",
        "opk",
        "TopK",
        "_top",
        "scatter",
        "gather",
        "searchsorted",
        "oftmax",
        "SoftMax",
        "cumsum",
        "scan",
    ),
    "activation": ("swiglu",),
    "norm": ("rms", "layer_norm", "LayerNorm", "GammaBeta", "_norm"),
    "grouped GEMMs": ("group", "Group", "PtrArray"),
    "GEMMs": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitK"),
    "rotary": ("heads_", "_split", "_merge", "rotate"),  # behind GEMMs: some are named …_splitK
    "copies": ("Memcpy", "Memset", "copy", "FillFunctor", "CatArray"),
    "sums of gradients and other element-wise": ("elementwise", "reduce", "foreach", "triton"),
}


def main() -> None:
    """Profile the runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--top", type=int, default=12, help="kernels by name")
    parser.add_argument("--json", type=Path)
    args, overrides = parser.parse_known_args()
    launch = Launch.from_environment(os.environ)
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream())
    with process_world(launch.rank, launch.world_size or 1, device):
        for chosen in (
            list(group) for slash, group in itertools.groupby(overrides, "/".__eq__) if not slash
        ):
            found = {
                "overrides": chosen,
                "gpu": torch.cuda.get_device_name().split()[1],
                **train(chosen, launch, device, steps=args.steps, top=args.top),
            }
            if launch.rank == 0:
                show(found)
                if args.json:
                    with args.json.open("a") as file:
                        file.write(json.dumps(found) + "\n")


def train(
    overrides: list[str], launch: Launch, device: torch.device, steps: int, top: int
) -> dict[str, Any]:
    """One run, from nothing to nothing."""
    torch._C._cuda_clearCublasWorkspaces()  # of the run before, which this one may not need
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    (hot,) = [word[4:] for word in overrides if word.startswith("hot=")] or [None]
    words = [word for word in overrides if not word.startswith("hot=")]
    plan = Plan(load_overrides(words, launch.world_size))
    engine = build_engine(plan, create_groups(plan.layout, launch.rank), device)
    with engine.watchdog.running(), routers_prefer(hot, plan.run, device):
        try:
            return measure(engine, steps, top)
        finally:
            engine.release()
            engine.gather_all_params()
            del engine
            gc.collect()


@contextmanager
def routers_prefer(hot: str | None, run: Run, device: torch.device) -> Iterator[None]:
    """Within the block routers add an offset to the scores of the first experts: COUNT:OFFSET."""
    if hot is None:
        yield
        return
    assert run.model.moe is not None
    count, offset = hot.split(":")
    bias_E = torch.zeros(run.model.moe.num_experts, device=device)
    bias_E[: int(count)] = float(offset)
    choose = phases.choose

    def biased(logits_TE: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return choose(logits_TE + bias_E, *given, **named)

    with patch.object(phases, "choose", biased):
        yield


def rank_load(engine: Engine, report: StepReport, counts: Iterable[Tensor]) -> dict[str, float]:
    """Rows of the busiest expert-parallel rank over the mean: of a layer in a step; with clones of
    single microbatches, and what these computed.
    """
    ranks = engine.groups.layout.ep
    loads = []
    for counts_E in counts:
        total_E = counts_E.clone()
        all_reduce(total_E, engine.groups.tp_cp_dp_control)
        load_R = total_E.view(ranks, -1).sum(dim=1)
        loads.append(float(load_R.max() / load_R.double().mean()))
    found = {"rank_load": round(statistics.mean(loads), 3)} if loads else {}
    if report.moe_rank_load_before is not None and report.moe_rank_load_after is not None:
        found |= {
            "rank_load_before": round(report.moe_rank_load_before, 3),
            "rank_load_after": round(report.moe_rank_load_after, 3),
            "clones": report.moe_clones,
        }
    return found


def measure(engine: Engine, steps: int, top: int) -> dict[str, Any]:
    """Times, memory and the trace of the last step."""
    run, step, times = engine.plan.run, TrainingStep(engine), []
    batches = [batches_of(run, kind, engine.groups.dp_rank) for kind in range(2)]
    for n in range(steps):
        began = time.perf_counter()
        report, totals = step(batches[n % 2], run.optim.lr, run.optim.weight_decay)
        times.append((time.perf_counter() - began) * 1e3)
    peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    for _ in range(2):  # the first trace starts slowly
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step(batches[0], run.optim.lr, run.optim.weight_decay)
            torch.cuda.synchronize()
    load = [float(counts.max() / counts.double().mean()) for counts in totals.counts.values()]
    ms = statistics.median(times[steps // 2 :])
    tokens = run.train.global_batch * run.train.seq_len / run.world_size
    graphs = {} if engine.recorder is None else GraphFacts.of(engine.recorder).metrics()
    planned = engine.plan.memory[engine.groups.pp_rank]
    traced = kinds(profiler, top)
    of_kinds = traced["kinds_ms"]
    return {
        "step_ms": round(ms, 2),
        "tflops_per_gpu": round(
            tokens * flops_per_token(run.model, run.train.seq_len) / ms / 1e9, 1
        ),
        "peak_gib": round(peak[0] / 2**30, 3),
        "planned_gib": round(planned.allocated / 2**30, 3),
        "reserved_gib": round(peak[1] / 2**30, 3),
        **rank_load(engine, report, totals.counts.values()),
        "load_max_over_mean": round(statistics.mean(load), 2) if load else None,
        "loss": report.loss,
        **{name: round(value, 4) for name, value in graphs.items()},
        **traced,
        "own_ms_by_rank": of_all_ranks(
            sum(of_kinds.values()) - of_kinds.get("exchange", 0.0), engine.groups.host
        ),
    }


def of_all_ranks(value: float, host: dist.ProcessGroup) -> list[float]:
    """Return the value of every rank of a group, in order of ranks."""
    found = [value] * host.size()
    dist.all_gather_object(found, value, host)
    return [round(each, 2) for each in found]


def kinds(profiler: profile, top: int) -> dict[str, Any]:
    """Milliseconds by kind, of the largest kernels, and of gaps."""
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = merged(sorted((e.time_range.start, e.time_range.end) for e in events))
    by_name: Counter[str] = Counter()
    for event in events:
        by_name[event.name] += event.time_range.end - event.time_range.start
    by_kind: Counter[str] = Counter()
    for name, time_us in by_name.items():
        by_kind[
            next(
                (kind for kind, parts in KINDS.items() if any(part in name for part in parts)),
                "others",
            )
        ] += time_us
    busy, whole = sum(end - start for start, end in spans), spans[-1][1] - spans[0][0]
    return {
        "traced_ms": round(whole / 1e3, 2),
        "gaps_ms": round((whole - busy) / 1e3, 2),
        "kernels": len(events),
        "kinds_ms": {kind: round(time_us / 1e3, 2) for kind, time_us in by_kind.most_common()},
        "largest_ms": {
            name[:100]: round(time_us / 1e3, 2) for name, time_us in by_name.most_common(top)
        },
    }


def show(found: dict[str, Any]) -> None:
    """As text."""
    kinds_ms, largest_ms = found["kinds_ms"], found["largest_ms"]
    print(" ".join(found["overrides"]))
    print(
        "  "
        + ", ".join(
            f"{key} {value}" for key, value in found.items() if not isinstance(value, dict | list)
        )
    )
    for kind, ms in kinds_ms.items():
        print(f"  {ms:9.2f} ms  {ms / found['traced_ms']:5.1%}  {kind}")
    for name, ms in largest_ms.items():
        print(f"      {ms:9.2f} ms  {name}")
    print(flush=True)


if __name__ == "__main__":
    main()
