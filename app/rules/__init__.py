"""Rules that span sections of the configuration: small named functions in one tuple, applied
before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable

from app.choices import GraphImpl
from app.config import Run
from app.errors import ConfigError
from app.rules.graphs import check_graphs_beside, check_graphs_choice, check_recompute
from app.rules.layout import (
    check_clones,
    check_context_parallel,
    check_expert_parallel,
    check_expert_widths,
    check_layout,
    check_sequence,
    check_static_dispatch,
    check_tensor_parallel,
    check_world,
)
from app.rules.pipeline import check_schedule_choice, check_stages
from app.rules.precision import check_fp8
from app.rules.sizes import check_microbatches, check_sizes
from app.rules.training import check_batch, check_lr_schedule, check_rollback

RULES: tuple[Callable[[Run], None], ...] = (
    check_sizes,
    check_world,
    check_expert_parallel,
    check_tensor_parallel,
    check_sequence,
    check_context_parallel,
    check_layout,
    check_static_dispatch,
    check_clones,
    check_recompute,
    check_expert_widths,
    check_fp8,
    check_batch,
    check_stages,
    check_microbatches,
    check_schedule_choice,
    check_graphs_choice,
    check_graphs_beside,
    check_lr_schedule,
    check_rollback,
)


def check(run: Run) -> Run:
    """Apply every cross-section rule; returns the run unchanged or raises ConfigError."""
    for rule in RULES:
        rule(run)
    return run


# What can be planned but not yet trained: key -> the values that training takes.
TRAINED: dict[str, tuple[object, ...]] = {
    "cuda_graph.impl": (GraphImpl.none, GraphImpl.local, GraphImpl.full_iteration),
}


def check_runnable(run: Run) -> Run:
    """Refuse what can be planned but not yet trained; returns the run unchanged or raises
    ConfigError.
    """
    for key, values in TRAINED.items():
        section, name = key.split(".")
        value = getattr(getattr(run, section), name)
        if value not in values:
            shown = value
            if isinstance(value, tuple):
                shown = [getattr(part, "value", part) for part in value]
            rule = "can be planned (python -m app.cli.plan), but training does not do it yet"
            raise ConfigError(key, shown, rule, nearest=values)
    return run
