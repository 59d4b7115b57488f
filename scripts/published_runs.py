"""Write docs/published-runs.md: public numbers of other programs beside our plans of those runs.

    python scripts/published_runs.py

A row is what its source says as overrides, the number, and what our program does otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.advice.published import PublishedGap, published_gap
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.plan_views.published import SHOWN, gap_lines
from app.plan.formatting import figures, gib
from app.planner.attention import planned_attention
from app.planner.plan import Plan

PAGE = Path(__file__).resolve().parent.parent / "docs/published-runs.md"
COMMAND = "python scripts/published_runs.py"
BRIDGE = (
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/067f987df03b8355b03192d88d70f1709fedf51a"
)
CARDS = f"{BRIDGE}/examples/model_verification_cards"
ARCHIVE = f"{BRIDGE}/docs/performance-summary-archive.md"
HEAD = f"""\
# Published runs, planned

`{COMMAND}` writes this page. It plans public runs of Megatron-Bridge on H100s
from their recipes, and says which part of the planned step accounts for the difference.
`python -m app.cli.plan compare_to=N` with overrides does so for any run.

A published number is one total, so it says nothing about parts. A part can account for the gap if
the step is as fast as published once this part alone takes the multiple in the last column. The
range has the error of plans in nine of ten measured cases, 12 % on one node
([planning.md](planning.md#accuracy)), and a network between nodes of half to twice
`hardware.network_gb_s`, which no run of ours has measured. What a recipe does otherwise is our
reading of it, not a measurement.
"""
COMMON = (
    "hardware=h100", "precision=bf16", "precision.grads=bfloat16", "train.device=cuda",
    "train.deterministic=false",
)  # fmt: skip
QWEN = (
    *COMMON, "model=qwen3_30b_a3b", "parallel.world_size=16", "parallel.ep=16", "parallel.etp=1",
    "train.seq_len=4096", "train.micro_batch=1", "train.global_batch=1024", "cuda_graph=partial",
    "cuda_graph.scope=[attn,moe_router,moe_preprocess]",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A public number, and the run as our overrides."""

    name: str
    source: str  # address of the number
    tflops: float  # published, model TFLOP/s per GPU
    tokens: float  # published, tokens per second and GPU
    overrides: tuple[str, ...]
    why: str  # what explains the gap, in our reading


RUNS = (
    PublishedRun(
        "Moonlight-16B-A3B, 16 H100s, natural routing",
        f"{CARDS}/moonlight-16b-a3b/card.yaml",
        tflops=386.59,
        tokens=22_528,
        overrides=(
            *COMMON, "model=deepseek_v2_lite", "model.name=moonlight", "model.yarn=null",
            "model.ffn_hidden_size=11264", "model.vocab_size=163840", "model.rope_theta=50000",
            "model.moe.score=sigmoid", "model.moe.pre_softmax=false",
            "model.moe.routed_scale=2.446", "parallel.world_size=16", "parallel.ep=8",
            "parallel.etp=1", "train.seq_len=4096", "train.micro_batch=2",
            "train.global_batch=1024",
        ),
        why=(
            "The recipe overlaps the dispatch of one microbatch with compute of another"
            " (overlap_moe_expert_parallel_comm, HybridEP). Our all_to_all does not, and its time"
            " is larger than the gap."
        ),
    ),
    PublishedRun(
        "Qwen3-30B-A3B, 16 H100s, forced balance",
        f"{CARDS}/qwen3-30b-a3b/card.yaml",
        tflops=299.352,
        tokens=13_011.4,
        overrides=(*QWEN, "model.moe.force_balance=true"),
        why=(
            "Experts lie on two nodes. HybridEP sends a token once to each node and overlaps that"
            " with compute; the plan sends it once per expert, and exposes it. Our graphs hold"
            " attention too, which theirs do not."
        ),
    ),
    PublishedRun(
        "Qwen3-30B-A3B, 16 H100s, natural routing",
        f"{CARDS}/qwen3-30b-a3b/card.yaml",
        tflops=199.120,
        tokens=8_654.6,
        overrides=QWEN,
        why=(
            "The same layout without overlap of dispatch and compute, which is also part of the"
            " difference between the two published numbers. The plan assumes the experts' loads of"
            " fresh routers."
        ),
    ),
    PublishedRun(
        "DeepSeek-V3, 1,024 H100s, FP8, forced balance",
        f"{ARCHIVE}#2509-nemo-container",
        tflops=338,
        tokens=1_297,
        overrides=(
            *COMMON, "model=deepseek_v3_like", "model.mtp.layers=1", "model.moe.force_balance=true",
            "precision.fp8.recipe=current", "recompute.phases=[attn_core,mlp_act]",
            "parallel.world_size=1024", "parallel.tp=2", "parallel.pp=8", "parallel.ep=64",
            "parallel.etp=1", "parallel.layout=Et|(tt|)*30L", "train.seq_len=4096",
            "train.micro_batch=1", "train.global_batch=8192",
        ),
        why=(
            "Experts lie on eight nodes, and the plan sends a token once for each of its eight"
            " experts. A dispatcher that sends one copy per node, to at most four groups of"
            " experts, sends less than half of that over the network."
        ),
    ),
    PublishedRun(
        "Llama 3.1 405B, 1,024 H100s, FP8",
        f"{ARCHIVE}#260401-nemo-container",
        tflops=827,
        tokens=328,
        overrides=(
            *COMMON, "model=llama3_8b", "model.name=llama31_405b", "model.num_layers=126",
            "model.hidden_size=16384", "model.ffn_hidden_size=53248", "model.num_heads=128",
            "precision.fp8.recipe=current", "parallel.world_size=1024", "parallel.tp=8",
            "parallel.pp=8", "parallel.cp=2", "parallel.layout=Et|(tt|)*62tL",
            "train.seq_len=8192", "train.micro_batch=1", "train.global_batch=1536",
        ),
        why=(
            "The recipe overlaps tensor-parallel collectives with GEMMs in pieces (user buffers)."
            " Ours run before and after GEMMs, and their time is larger than the gap."
        ),
    ),
)  # fmt: skip


def plan_of(run: PublishedRun) -> Plan:
    """Return our plan of a published run."""
    typed = Typed.parse([_spelled(word) for word in run.overrides])
    return Plan(planned_attention(load_typed(typed)))


def _spelled(override: str) -> str:
    """Return an override with a layout in the quotes that Hydra asks for."""
    key, _, value = override.partition("=")
    return f"{key}='{value}'" if "|" in value else override


def page() -> str:
    """Return the page."""
    found = [(run, plan_of(run)) for run in RUNS]
    gaps = [published_gap(plan, run.tflops) for run, plan in found]
    rows = [_row(run, gap) for run, gap in zip(RUNS, gaps, strict=True)]
    table = [
        "| run | published | planned | range | FLOPs per token, theirs and ours | largest part |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    parts = [
        "\n".join(_section(run, plan, gap)) for (run, plan), gap in zip(found, gaps, strict=True)
    ]
    return "\n".join([HEAD, *table, "", *parts])


def _row(run: PublishedRun, gap: PublishedGap) -> str:
    largest = max(gap.parts, key=lambda part: part.seconds)
    cells = (
        run.name,
        figures(run.tflops),
        figures(gap.planned_tflops),
        f"{figures(gap.low_tflops)} to {figures(gap.high_tflops)}",
        f"{run.tflops * 1e3 / run.tokens:.1f} G, {gap.flops_per_token / 1e9:.1f} G",
        f"{largest.name}, {largest.seconds / gap.planned_seconds:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def _section(run: PublishedRun, plan: Plan, gap: PublishedGap) -> Iterator[str]:
    yield f"## {run.name}\n"
    yield f"[Source]({run.source}).\n"
    spelled = map(_spelled, run.overrides)
    words = " \\\n    ".join(f'"{word}"' if "'" in word else word for word in spelled)
    yield f"```bash\npython -m app.cli.plan compare_to={run.tflops:g} \\\n    {words}\n```\n"
    yield from (f"- {line}" for line in gap_lines(gap)[:3])
    memory = f"{gib(plan.busiest.total)} GiB planned, of {gib(plan.gpu_memory)}"
    lacks = "" if plan.fits else ": the published run keeps less than these overrides"
    yield f"- Memory: {memory}{lacks}."
    yield f"- {run.why}\n"
    yield "| part | ms | share | as published at |\n|---|---|---|---|"
    for part in gap.parts:
        if part.seconds > 4 * SHOWN * gap.planned_seconds:
            closes = "—" if part.closes is None else f"× {part.closes:.2f}"
            share = f"{part.seconds / gap.planned_seconds:.1%}"
            yield f"| {part.name} | {figures(part.seconds * 1e3)} | {share} | {closes} |"
    yield ""


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
