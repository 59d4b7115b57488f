"""what=rehearse of the plan command: choose ranks, check that they fit, run and show them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.plan_views.rehearsed import comparison, print_rehearsed
from app.cli.processes.output import table_width
from app.engine.ranks.memory import memory_of
from app.engine.rehearsal.rehearse import refuse_what_needs_others, rehearse
from app.engine.run.train import on_device
from app.engine.start.attention import attention_here
from app.errors import ConfigError
from app.plan.formatting import gib
from app.planner.plan import Plan
from app.telling import telling

WIDTH = 100  # columns unless the terminal or COLUMNS says otherwise


def rehearse_ranks(
    plan: Plan, typed: Typed, rank: str | None, *, steps: int, as_json: bool
) -> list[dict[str, Any]]:
    """Rehearse ranks, print tables unless `as_json`, and return their rows. Raises ConfigError."""
    ranks = _ranks(plan, rank)
    device = on_device(plan.run, 0)
    plan = Plan(attention_here(plan.run, device)[0])
    refuse_what_needs_others(plan.run, device)
    for each in ranks:
        _check_fits(plan, typed, each, device)
    console = Console(
        width=table_width(sys.stdout, WIDTH), highlight=False, markup=False, emoji=False
    )
    rows = []
    for each in ranks:
        with telling(f"rehearsing rank {each:,} of {plan.run.world_size:,}", stream=sys.stderr):
            found = rehearse(plan, each, device, steps)
        shown = comparison(plan, found)
        if not as_json:
            print_rehearsed(plan, found, shown, console)
        rows.append(
            {"rank": each, "pp_rank": found.pp_rank, "device": found.device}
            | {"rows": found.rows, "parts": [asdict(row) for row in shown]}
        )
    return rows


def _ranks(plan: Plan, text: str | None) -> list[int]:
    """Return the ranks asked for; by default the first of the fullest pipeline rank."""
    world = range(plan.run.world_size)
    if text is None:
        fullest = plan.busiest.pp_rank
        return [next(rank for rank in world if plan.layout.coords(rank)["pp"] == fullest)]
    words = text.strip("[]").split(",")
    if not all(word.isdigit() and int(word) in world for word in words):
        rule = f"must be ranks from 0 to {len(world) - 1}, separated by commas"
        raise ConfigError("rank", text, rule, nearest=0)
    return [int(word) for word in words]


def needed(plan: Plan, pp_rank: int, device: torch.device) -> int:
    """Return the planned bytes of a rank here: without other ranks there is no NCCL, and a CPU
    has no libraries of a GPU.
    """
    memory = plan.memory[pp_rank]
    if device.type == "cuda":
        return memory.total - sum(part.bytes for part in memory.parts if part.name == "NCCL")
    return memory.allocated - sum(
        part.bytes for part in memory.parts if part.name == "library workspaces"
    )


def _check_fits(plan: Plan, typed: Typed, rank: int, device: torch.device) -> None:
    """Raise ConfigError if the rank needs more memory than this device has."""
    pp_rank = plan.layout.coords(rank)["pp"]
    there, size = memory_of(plan.run, device), needed(plan, pp_rank, device)
    if size <= there:
        return
    what = "this GPU" if device.type == "cuda" else "this host"
    rule = f"is planned to need {gib(size)} GiB, and {what} has {gib(there)}"
    raise ConfigError("rank", rank, rule, advice=_advice(plan, typed, device, there))


def _advice(plan: Plan, typed: Typed, device: torch.device, there: int) -> str:
    for words in _smaller(plan):
        try:
            tried = Plan(attention_here(load_typed(typed.with_overrides(words)), device)[0])
            fits = max(needed(tried, each, device) for each in range(tried.layout.pp)) <= there
        except ConfigError:
            continue
        if fits:
            return f"with {' '.join(words)} every rank fits"
    return "rehearse a smaller model"


def _smaller(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield overrides of smaller runs, the largest of them first."""
    stages = len(plan.stages.in_order)
    layers = (f"model.num_layers={stages}", "parallel.layout=null")
    yield ("train.micro_batch=1",)
    yield ("recompute.full=true",)
    yield layers
    yield (*layers, "recompute.full=true")
    yield (*layers, "recompute.full=true", f"model.hidden_size={plan.run.model.hidden_size // 4}")
