"""Advanced keys: rarely set, listed apart, and otherwise like all keys."""

from __future__ import annotations

from app.config.model import RARE_SECTIONS

# Keys, and sections with all their keys.
ADVANCED = (
    # architectures: presets and config.json of published models set these
    *(f"model.{section}" for section in RARE_SECTIONS),
    "model.rotary_dim",
    "model.attention_gate",
    "model.linear_attention",
    "model.linear_rope_factor",
    "model.qk_norm_whole",
    "model.local_rope_theta",
    "model.mlp_gate",
    "model.query_pre_attn_scalar",
    "model.embedding_scale",
    "model.residual_scale",
    "model.logit_scale",
    "model.mla.norm_eps",
    "model.moe.logit_bias",
    "model.moe.swiglu_limit",
    "model.moe.swiglu_alpha",
    "model.moe.dense_layers",
    "model.moe.group_best",
    "model.moe.norm_topk_prob",
    "model.moe.jitter_eps",
    # experts: how tokens and replicas travel, and what plans assume
    "model.moe.shared_overlap",
    "model.moe.planned_imbalance",
    "model.moe.static.transport",
    "model.moe.static.on_overflow",
    "model.moe.static.paged_buffer",
    "model.moe.echo.algorithm",
    "model.moe.echo.threshold",
    "model.moe.echo.check",
    # plans and pipelines
    "parallel.cp_comm_type",
    "parallel.count_embedding",
    "parallel.count_head",
    "parallel.elastic",
    "parallel.replaced",
    "hardware.efficiency",
    "hardware.node_gb_s",
    "hardware.profile",  # written by app.cli.calibrate
    "schedule.group_size",
    "schedule.overlap_p2p",
    "schedule.batch_p2p",
    "schedule.timeout_s",
    "cuda_graph.marks",
    "recompute.partial_microbatches",
    "recompute.offload",
    # numbers
    "precision.loss_scale",
    "precision.initial_loss_scale",
    "precision.min_loss_scale",
    "precision.loss_scale_window",
    "precision.loss_scale_hysteresis",
    "precision.fp8.first_layers",
    "precision.fp8.last_layers",
    "precision.fp8.amax_history",
    "precision.fp8.margin",
    "precision.fp8.backend",
    "optim.wsd_decay",
    "optim.moments",
    "optim.overlap_grads",
    "optim.overlap_params",
    "optim.bucket_numel",
    # files and reactions
    "data.validation_documents",
    "data.max_documents",
    "data.packing",
    "data.truncate",
    "data.cache_dir",
    "data.accept_changed",
    "checkpoint.frozen",
    "checkpoint.memory_every",
    "lora.rslora",
    "lora.base",
    "log.group",
    "log.mlflow",
    "log.trackio",
    "log.verbose",
    "sweep",
    "train.profile",
    "train.max_bad_steps",
    "train.max_rollbacks",
    "train.replay_every",
    "train.on_corruption",
)


def is_advanced(key: str) -> bool:
    """Return whether a dotted key or section is listed among the advanced ones."""
    return any(key == name or key.startswith(f"{name}.") for name in ADVANCED)
