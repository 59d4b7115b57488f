"""Rules that span sections of the configuration, applied before anything is built.

What one section alone decides is checked where its dataclass is built, in `app.config`. `block` has
what keys of the model exclude of each other, `attention` what attention libraries cannot compute.
"""

from __future__ import annotations

from collections.abc import Callable

from app.config import Run
from app.rules.attention import check_attention
from app.rules.block import check_block
from app.rules.frozen import check_frozen
from app.rules.graphs import (
    check_graphs_beside,
    check_graphs_choice,
    check_graphs_update,
    check_recompute,
)
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
from app.rules.lora import check_lora
from app.rules.offload import check_offload
from app.rules.pipeline import check_schedule_choice, check_stages
from app.rules.precision import check_fp8
from app.rules.sizes import check_microbatches, check_sizes
from app.rules.training import (
    check_batch,
    check_epochs,
    check_lr_schedule,
    check_memory_copies,
    check_profile,
    check_replays,
    check_rollback,
)

# Sizes come first: later rules plan stages and schedules, which takes too long for absurd sizes.
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
    check_offload,
    check_expert_widths,
    check_fp8,
    check_block,
    check_attention,
    check_batch,
    check_lora,
    check_frozen,
    check_stages,
    check_microbatches,
    check_schedule_choice,
    check_graphs_update,
    check_graphs_choice,
    check_graphs_beside,
    check_epochs,
    check_lr_schedule,
    check_rollback,
    check_memory_copies,
    check_replays,
    check_profile,
)


def check(run: Run) -> Run:
    """Return the run if every cross-section rule holds; otherwise raise ConfigError."""
    for rule in RULES:
        rule(run)
    return run
