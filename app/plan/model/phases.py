"""Phases of a decoder layer, by name: units of execution, capture, recomputation and tracing."""

from __future__ import annotations

from enum import StrEnum


class PhaseName(StrEnum):
    """Every phase that a layer may have, in order."""

    attn = "attn"
    mlp = "mlp"
    norm = "norm"
    shared = "shared"
    route = "route"
    preprocess = "preprocess"
    dispatch = "dispatch"
    experts = "experts"
    combine = "combine"
    finish = "finish"
