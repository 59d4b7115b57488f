"""The plan of a run in a few lines, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from app.config import Run
from app.plan.flops import flops_per_token, parameter_count


def summary_lines(run: Run) -> Iterator[tuple[str, str]]:
    """(heading, text) pairs."""
    count = parameter_count(run.model)
    active = f", {count.active / 1e6:.1f} M used per token" if run.model.moe else ""
    yield "model", f"{run.model.name}: {count.total / 1e6:.1f} M parameters{active}, {run.model.num_layers} layers, {run.precision.params.value}"
    yield "layout", f"{run.world_size} {'process' if run.world_size == 1 else 'processes'}: dp {run.dp}, ep {run.parallel.ep}"
    tokens = run.train.global_batch * run.train.seq_len
    yield "step", (f"{tokens:,} tokens: {run.train.global_batch} sequences of {run.train.seq_len}, "
                   f"{run.num_microbatches} microbatches of {run.train.micro_batch} per rank")
    total = run.train.steps * tokens
    flops = total * flops_per_token(run.model, run.train.seq_len)
    yield "run", f"{run.train.steps} steps, {total / 1e6:.1f} M tokens, {flops:.2e} FLOPs"
