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
from app.engine.ranks.memory import fits
from app.engine.start.start import Start
from app.errors import ConfigError
from app.model.attention.chosen import library_attention
from app.planner.attention import faster_attention, with_attention
from app.planner.plan import Plan
from app.rules.attention import KEY

BY_TORCH = AttentionBackendKind.torch


def choose_attention(
    plan: Plan, groups: Groups, device: torch.device, start: Start
) -> tuple[Plan, Start]:
    """Return the plan with the library that computes attention, the same on all ranks, and the
    start with why that is torch where another would be faster; all ranks call it.

    A run continues with the library of its checkpoint, so that resuming changes no bit, unless this
    host lacks it, which is one of the start's `changes`.
    """
    run = plan.run
    if run.train.attention_backend is not AttentionBackendKind.auto:
        return plan, start
    recorded = _recorded(start.manifest)
    faster = faster_attention(run) if device.type == "cuda" else None
    if faster is None:
        return Plan(with_attention(run, BY_TORCH), plan.known), _noted(start, recorded)
    reasons: list[str | None] = [None] * groups.host.size()
    own = _why_not(faster, device, recorded)
    dist.all_gather_object(reasons, own, group=groups.host)
    reason = next((each for each in reasons if each is not None), None)
    if reason is None:
        return Plan(faster, plan.known), start
    return Plan(with_attention(run, BY_TORCH), plan.known), _noted(start, recorded, reason)


def _recorded(manifest: Mapping[str, Any] | None) -> str | None:
    """Return the library of attention that a checkpoint was trained with; None without any."""
    saved = (manifest or {}).get("config", {}).get("train", {}).get("attention_backend")
    return None if saved is None else str(saved)


def _noted(start: Start, recorded: str | None, reason: str | None = None) -> Start:
    """Return the start of a run with torch's attention; `recorded`: of its checkpoint."""
    changes = start.changes
    if recorded == AttentionBackendKind.transformer_engine.value:
        changes = (*changes, f"{KEY}: {recorded} -> {BY_TORCH.value}")
    return replace(start, by_torch=reason, changes=changes)


def _why_not(faster: Run, device: torch.device, recorded: str | None) -> str | None:
    """Return why this rank does not compute by Transformer Engine; None if it can."""
    if recorded == BY_TORCH.value:
        return "the checkpoint was trained so, and other kernels round otherwise"
    if not fits(faster, device):
        return "cuDNN's ordered backward stores all scores, for which the GPU lacks memory"
    try:
        library_attention(faster, DTYPES[faster.precision.params], device)
    except ConfigError as error:
        return f"{error.rule}; {error.advice}" if error.advice else error.rule
    return None
