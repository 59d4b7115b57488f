"""Choose the library that computes attention, with train.attention_backend=auto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from app.choices import AttentionBackendKind
from app.config import Run
from app.engine.ranks.dtypes import DTYPES
from app.engine.ranks.groups import Groups
from app.engine.ranks.memory import memory_of
from app.engine.start.start import Start
from app.errors import ConfigError
from app.model.attention.chosen import library_attention
from app.plan.memory.overheads import MOST
from app.planner.attention import allowed_library, asks, ordered_attention, with_attention
from app.planner.plan import Plan
from app.rules.attention import KEY

BY_TORCH, BY_LIBRARY = AttentionBackendKind.torch, AttentionBackendKind.transformer_engine


def choose_attention(
    plan: Plan, groups: Groups, device: torch.device, start: Start
) -> tuple[Plan, Start]:
    """Return the plan with the library that computes attention, the same on all ranks, and the
    start with why that is torch where another would be faster; all ranks call it.

    A run continues with the library of its checkpoint, so that resuming changes no bit, unless this
    host lacks it, which is one of the start's `changes`.
    """
    if not asks(plan.run):
        return plan, start
    recorded = _recorded(start.manifest)
    reasons: list[str | None] = [None] * groups.host.size()
    run, own = attention_here(plan.run, device, recorded)
    dist.all_gather_object(reasons, own, group=groups.host)
    reason = next((each for each in reasons if each is not None), None)
    if reason is not None:
        run = with_attention(run, BY_TORCH)
    if recorded == BY_LIBRARY.value and run.train.attention_backend is BY_TORCH:
        changed = f"{KEY}: {recorded} -> {BY_TORCH.value}"
        start = replace(start, changes=(*start.changes, changed))
    return Plan(run, plan.known), replace(start, by_torch=reason)


def attention_here(
    run: Run, device: torch.device, recorded: str | None = None
) -> tuple[Run, str | None]:
    """Return the run with the library of attention that `auto` stands for on this device, and why
    that is torch where another would be faster. `recorded`: the library of the checkpoint.
    """
    if not asks(run):
        return run, None
    found = allowed_library(run) if recorded == BY_LIBRARY.value else ordered_attention(run)
    if device.type != "cuda" or found is None:
        return with_attention(run, BY_TORCH), None
    reason = _why_not(found, device, recorded)
    return (found, None) if reason is None else (with_attention(run, BY_TORCH), reason)


def _recorded(manifest: Mapping[str, Any] | None) -> str | None:
    """Return the library of attention that a checkpoint was trained with; None without any."""
    saved = (manifest or {}).get("config", {}).get("train")
    # checkpoints without the key are of a program that had torch's only
    return None if saved is None else str(saved.get("attention_backend", BY_TORCH.value))


def _why_not(found: Run, device: torch.device, recorded: str | None) -> str | None:
    """Return why this rank does not compute by Transformer Engine; None if it can."""
    if recorded == BY_TORCH.value:
        return "the checkpoint was trained so, and other kernels round otherwise"
    enough = MOST * memory_of(found, device)
    if recorded != BY_LIBRARY.value and Plan(found).busiest.total > enough:
        return "cuDNN's ordered backward stores all scores, for which the GPU lacks memory"
    try:
        library_attention(found, DTYPES[found.precision.params], device)
    except ConfigError as error:
        return f"{error.rule}; {error.advice}" if error.advice else error.rule
    except Exception as error:  # of a release of the library that is not known yet
        what = str(error).partition("\n")[0]
        return f"Transformer Engine cannot be used: {type(error).__name__}: {what}"
    return None
