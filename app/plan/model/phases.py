"""Phases of a decoder layer, by name: what is run, captured, recomputed, traced one by one."""

from __future__ import annotations

from enum import StrEnum


class PhaseName(StrEnum):
    """Every phase a layer may have, in order."""

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
