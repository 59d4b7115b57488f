"""The plan of a run in a few lines, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from app.config import Run
from app.plan.flops import flops_per_token, parameter_count


def summary_lines(run: Run) -> Iterator[tuple[str, str]]:
    """(heading, text) pairs."""
    model, train = run.model, run.train
    count = parameter_count(model)
    active = f", {count.active / 1e6:.1f} M used per token" if model.moe else ""
    size = f"{count.total / 1e6:.1f} M parameters{active}"
    yield "model", f"{model.name}: {size}, {model.num_layers} layers, {run.precision.params.value}"
    yield "layout", f"{run.world_size} {'process' if run.world_size == 1 else 'processes'}: dp {run.dp}, ep {run.parallel.ep}"
    tokens = train.global_batch * train.seq_len
    micro = f"{run.num_microbatches} microbatches of {train.micro_batch} per rank"
    yield "step", f"{tokens:,} tokens: {train.global_batch} sequences of {train.seq_len}, {micro}"
    flops = train.steps * tokens * flops_per_token(model, train.seq_len)
    yield "run", f"{train.steps} steps, {train.steps * tokens / 1e6:.1f} M tokens, {flops:.2e} FLOPs"
