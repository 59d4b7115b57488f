"""Find keys of a configuration that have no effect, given the others."""

from __future__ import annotations

from typing import Any

from app.choices import DispatcherKind, Dtype, Fp8Recipe, GraphImpl
from app.config.layout import OF_DELAYED

FP8 = "precision.fp8."
SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "loss_scale_hysteresis")


def unread(config: dict[str, Any]) -> tuple[str, ...]:
    """Return prefixes of dotted keys without effect in a configuration given as plain data.

    For example those of FP8 without a recipe. Missing sections are skipped.
    """
    precision = config.get("precision") or {}
    moe = (config.get("model") or {}).get("moe") or {}
    found = list[str]()
    recipe = (precision.get("fp8") or {}).get("recipe")
    if recipe is None:
        found.append(FP8)
    elif recipe != Fp8Recipe.delayed.value:
        found += (f"{FP8}{name}" for name in OF_DELAYED)
    if precision.get("params") != Dtype.float16.value:
        found += (f"precision.{name}" for name in SCALING)
    if (config.get("cuda_graph") or {}).get("impl") == GraphImpl.none.value:
        found.append("cuda_graph.")
    if moe.get("dispatcher") not in (DispatcherKind.auto.value, DispatcherKind.static.value):
        found += ("model.moe.static.", "model.moe.echo.")
    return tuple(found)
