"""Which library computes attention with train.attention_backend=auto."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from app.choices import AttentionBackendKind
from app.config import Run
from app.errors import ConfigError
from app.plan.memory.overheads import MOST
from app.planner.plan import Plan
from app.rules.attention import KEY, check_attention

AUTO = f"{KEY}={AttentionBackendKind.auto.value}"  # in parallel.replaced of a run with a choice
ORDERED = re.compile(r"\bG?[HB]\d{2,3}\b")  # names of GPUs of Hopper and Blackwell, as in profiles


def asks(run: Run) -> bool:
    """Return whether the library of attention is to be chosen, or has been."""
    return run.train.attention_backend is AttentionBackendKind.auto or AUTO in run.parallel.replaced


def with_attention(run: Run, backend: AttentionBackendKind) -> Run:
    """Return the run with attention by this library, and with a note if `auto` was asked for."""
    changed = dataclasses.replace(
        run, train=dataclasses.replace(run.train, attention_backend=backend)
    )
    if not asks(run) or AUTO in run.parallel.replaced:
        return changed
    replaced = (*run.parallel.replaced, AUTO)
    return dataclasses.replace(
        changed, parallel=dataclasses.replace(run.parallel, replaced=replaced)
    )


def ordered_attention(run: Run) -> Run | None:
    """Return the run with cuDNN's ordered backward instead of torch's; None if it is not faster, or
    rules forbid it. Its memory, and whether a host has it, is for the caller to check.
    """
    # in no fixed order torch calls cuDNN itself
    return allowed_library(run) if run.train.deterministic else None


def allowed_library(run: Run) -> Run | None:
    """Return the run with attention by Transformer Engine; None if rules forbid it."""
    found = with_attention(run, AttentionBackendKind.transformer_engine)
    try:
        check_attention(found)
    except ConfigError:
        return None
    return found


def planned_attention(run: Run, peak: Callable[[Run], int] | None = None) -> Run:
    """Return the run with the library that `auto` stands for on the GPUs of hardware.profile, if
    Transformer Engine is installed there; unchanged if a library is typed. `peak` returns the bytes
    of a run's busiest rank; None: those of its plan.
    """
    if not asks(run):
        return run
    profile = run.hardware.profile
    if profile is not None and ORDERED.search(profile.gpu):
        faster = ordered_attention(run)
        if faster is not None:
            plan = Plan(faster)
            needed = plan.busiest.total if peak is None else peak(faster)
            if needed <= MOST * plan.gpu_memory:
                return faster
    return with_attention(run, AttentionBackendKind.torch)
