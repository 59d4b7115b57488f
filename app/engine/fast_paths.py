"""Report which fast paths a run does not take, why, and the cost; and what CUDA graphs capture."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from app.choices import (
    AttentionBackendKind,
    Dtype,
    Fp8Recipe,
    GraphImpl,
    GraphScope,
    LinearBackendKind,
)
from app.config import Run
from app.errors import ConfigError, Instead
from app.kernels.common import moves_tiles, triton
from app.moe.dispatch.static import StaticDispatcher
from app.planner.attention import asks, ordered_attention
from app.planner.explain import Facts

NARROW = 1024  # hidden size up to which recipe `block` was measured no faster than bfloat16
SHORT = 8192  # tokens; cuDNN's deterministic backward stores all scores, GiB for longer ones


def facts_of(run: Run, device: torch.device, static: StaticDispatcher | None) -> Facts:
    """Return the device of a run and the fast paths that it does not take, as `slow_paths`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Facts(name, dict(slow_paths(run, device, static)))


def slow_paths(
    run: Run, device: torch.device, static: StaticDispatcher | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (part, the slow path taken, its reason and cost) for each fast path not taken.

    Costs are those of docs/benchmarks.md. `static`: the static dispatcher, if it is used.
    """
    if static is not None and static.planned.peer and static.peer is None:
        why = "this is a CPU" if device.type == "cpu" else "Triton is not installed"
        yield "dispatch", f"by collectives, since {why}: the same results"
    if device.type != "cuda":
        return
    if triton is None:
        yield (
            "kernels",
            "plain torch, since Triton is not installed: a step of model=small takes 1.5 "
            "times as long",
        )
    by_torch = run.train.attention_backend is not AttentionBackendKind.transformer_engine
    if run.train.deterministic and by_torch and run.model.attention_softcap is None:
        yield "attention", _ordered_attention(run)
    if slow := _slow_fp8(run):
        yield "FP8", slow
    if run.model.moe and run.precision.params is not Dtype.bfloat16:
        dtype = run.precision.params.value
        yield (
            "experts",
            "one GEMM after the other, and the host waits for their sizes: torch groups "
            f"GEMMs in bfloat16, not in {dtype}",
        )
    if _stores_gradients(run, device):
        why = "since this GPU has no tensor memory accelerator, as Hopper has"
        yield (
            "gradients",
            f"of expert weights are stored before they are added, {why}: 1.6 times the time",
        )


def _slow_fp8(run: Run) -> str | None:
    """Say why FP8 may be slower than 16-bit GEMMs in this run, as measured in docs/fp8.md.

    None where FP8 was measured faster.
    """
    fp8 = run.precision.fp8
    if fp8.recipe is None or not fp8.by_library:
        return None
    if fp8.backend is LinearBackendKind.torch:
        return "by the reference, multiplied in fp32: for tests, many times slower"
    if run.cuda_graph.impl is GraphImpl.none:
        return (
            "launched by the host, with cuda_graph=none: steps of model=small took 1.6 to 1.9 "
            "times those in bfloat16 on a slow one"
        )
    if fp8.recipe is Fp8Recipe.block and run.model.hidden_size <= NARROW:
        return (
            f"recipe=block gains nothing where layers are {NARROW} wide or less; "
            "precision.fp8.recipe=delayed does"
        )
    return None


def _ordered_attention(run: Run) -> str:
    """Say what torch's deterministic attention costs, and the cheaper backend if there is one."""
    line = "torch's deterministic kernel (train.deterministic=true): about half as fast"
    if asks(run) or ordered_attention(run) is None or run.train.seq_len > SHORT:
        return line
    backend = AttentionBackendKind.transformer_engine
    return f"{line}; cuDNN's is faster (train.attention_backend={backend.value})"


def _stores_gradients(run: Run, device: torch.device) -> bool:
    """True if expert weight gradients are stored before they are added to wider main gradients."""
    wide = run.precision.grads is Dtype.float32 and run.precision.params is not Dtype.float32
    return run.model.moe is not None and wide and not moves_tiles(device)


def graphs_line(run: Run, device: torch.device) -> str:
    """Say what is captured and in which step, for a run that captures."""
    graph = run.cuda_graph
    parts = ", ".join(part.value for part in graph.scope) or "whole layers"
    if graph.impl is GraphImpl.full_iteration:
        updates = " with their updates," if graph.optimizer else ""
        parts = f"full iterations{updates} and validations"
    on_cpu = ""
    if device.type != "cuda":
        on_cpu = "; on a CPU a stand-in reruns the work instead, without a speedup"
    return f"{parts}, captured in step {graph.warmup_steps + 1} of this process{on_cpu}"


def check_capturable(run: Run, device: torch.device) -> None:
    """Raise ConfigError if a captured part would make the host wait for the device."""
    graph = run.cuda_graph
    moe = run.model.moe
    if graph.optimizer and device.type == "cuda" and triton is None:
        rule = "captures AdamW, which makes the host wait for its learning rate without Triton"
        raise ConfigError("cuda_graph.optimizer", True, rule, nearest=False)
    parts = graph.impl is not GraphImpl.full_iteration and graph.scope
    no_experts = parts and GraphScope.moe not in graph.scope
    if device.type != "cuda" or graph.impl is GraphImpl.none or moe is None or no_experts:
        return
    if run.precision.params is not Dtype.bfloat16:
        dtype = run.precision.params.value
        rule = f"captures the experts, and in {dtype} the host waits for their sizes"
        what = "cuda_graph.impl"
        near = (Instead("precision=bf16"), Instead("cuda_graph=partial"))
        raise ConfigError(what, graph.impl, rule, nearest=near)
