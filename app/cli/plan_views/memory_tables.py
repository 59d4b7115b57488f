"""The plan's tables of memory: for training, and for generating text."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from app.cli.plan_views.rows import heading, new_table
from app.plan.formatting import count_of, figures, gib
from app.plan.memory.rank_memory import RankMemory
from app.plan.partners import shift_of
from app.plan.recompute import recompute_policy
from app.planner.decoding import fixed_bytes
from app.planner.export import Decoding
from app.planner.plan import Plan

MOST_COLUMNS = 4  # pipeline ranks side by side


def print_memory(plan: Plan, console: Console) -> None:
    """Print the memory at the peak, part by part."""
    heading(console, "Memory", "GiB at the peak, by pipeline rank")
    shown = _columns(plan)
    names = list(dict.fromkeys(part.name for rank in plan.memory for part in rank.parts))
    fullest = f", on rank {plan.busiest.pp_rank}" if len(shown) > 1 else ""
    table = new_table("part", *(f">rank {rank.pp_rank}" for rank in shown), f"how{fullest}")
    notes = {part.name: part.note for part in plan.busiest.parts}
    for name in names:
        table.add_row(name, *(_held(rank, name) for rank in shown), notes.get(name, ""))
    table.add_row("total", *(gib(rank.total) for rank in shown), style="bold")
    console.print(table)
    if plan.host_copies:
        _print_host_copies(plan, console)
    if most := max(rank.offloaded for rank in plan.memory):
        ranks = min(plan.run.world_size, plan.run.parallel.gpus_per_node)
        parts = ",".join(sorted(part.value for part in recompute_policy(plan.run).usual.offload))
        console.print(
            f"Activations in host memory (recompute.offload=[{parts}]): {gib(most)} GiB a rank, "
            f"{gib(most * ranks)} GiB a host of {count_of(ranks, 'rank')}, pinned in blocks of "
            "powers of two, which may be twice as much together.",
            style="dim",
        )
    console.print()


def _print_host_copies(plan: Plan, console: Console) -> None:
    """Print the host memory and the traffic of copies in memory, where they are largest."""
    most = max(plan.host_copies, key=lambda copies: copies.state)
    ranks = min(plan.run.world_size, plan.run.parallel.gpus_per_node)
    shift = shift_of(plan.run.world_size, plan.run.parallel.gpus_per_node)
    sent = gib(round(most.per_step))
    key = f"checkpoint.memory_every={plan.run.checkpoint.memory_every}"
    console.print(
        f"Copies in host memory ({key}): {gib(most.held)} GiB a rank, "
        f"{gib(most.held * ranks)} GiB a host of {count_of(ranks, 'rank')}, two copies each "
        f"of its own shard and of another rank's. {sent} GiB a step go to the host, "
        f"and as many to the rank {shift} above.",
        style="dim",
    )


def print_decoding(plan: Plan, console: Console) -> None:
    """Print the memory of keys and values when a trained model generates text."""
    found = Decoding.of(plan)
    text = f"texts of {found.context:,} tokens (train.seq_len), as generate continues them"
    heading(console, "Decoding", text)
    table = new_table(">pp rank", ">layers", ">weights GiB", ">KiB a token", ">GiB a text")
    for row in found.rows:
        counts = f"{row.pp_rank}", f"{row.layers}", gib(row.weights)
        table.add_row(*counts, figures(row.token / 2**10), figures(row.text / 2**30))
    console.print(table)
    batch = f" (batch={found.together * found.replicas})" if found.together else ""
    word, style = ("Fits", "bold green") if found.together else ("Does not fit", "bold red")
    console.print(
        Text.assemble(
            (word, style),
            f": {count_of(found.together, 'text')} at a time per replica{batch}, keys and "
            f"values beside weights in {gib(plan.gpu_memory)} GiB.",
        )
    )
    if not found.together:
        console.print(
            "parallel.tp and parallel.pp spread weights over more GPUs, parallel.ep the experts."
        )
    besides = gib(fixed_bytes(gpu=True))
    console.print(
        f"{besides} GiB for CUDA are counted, activations of prompts are not.", style="dim"
    )


def _columns(plan: Plan) -> list[RankMemory]:
    """Return all pipeline ranks; if there are many, the first, the fullest and the last."""
    if len(plan.memory) <= MOST_COLUMNS:
        return list(plan.memory)
    return [plan.memory[rank] for rank in sorted({0, plan.busiest.pp_rank, len(plan.memory) - 1})]


def _held(rank: RankMemory, name: str) -> str:
    return next((gib(part.bytes) for part in rank.parts if part.name == name), "—")
