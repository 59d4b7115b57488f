"""Which library computes attention with train.attention_backend=auto."""

from __future__ import annotations

import dataclasses
import re

from app.choices import AttentionBackendKind
from app.config import Run
from app.errors import ConfigError
from app.planner.plan import Plan
from app.rules.attention import check_attention

ORDERED = re.compile(r"\bG?[HB]\d{2,3}\b")  # names of GPUs of Hopper and Blackwell, as in profiles


def with_attention(run: Run, backend: AttentionBackendKind) -> Run:
    """Return the run with attention by this library."""
    return dataclasses.replace(run, train=dataclasses.replace(run.train, attention_backend=backend))


def faster_attention(run: Run) -> Run | None:
    """Return the run with cuDNN's ordered backward instead of torch's; None if it is not faster, or
    rules forbid it. Its memory, and whether a host has it, is for the caller to check.
    """
    if not run.train.deterministic:  # torch calls cuDNN then
        return None
    found = with_attention(run, AttentionBackendKind.transformer_engine)
    try:
        check_attention(found)
    except ConfigError:
        return None
    return found


def planned_attention(run: Run) -> Run:
    """Return the run with the library that `auto` stands for on the GPUs of hardware.profile, if
    Transformer Engine is installed there; unchanged for another value.
    """
    if run.train.attention_backend is not AttentionBackendKind.auto:
        return run
    profile = run.hardware.profile
    if profile is not None and ORDERED.search(profile.gpu):
        faster = faster_attention(run)
        if faster is not None and Plan(faster).fits:
            return faster
    return with_attention(run, AttentionBackendKind.torch)
