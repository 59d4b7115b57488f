"""Summary of a plan in a few lines, printed when a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from app.config import Fp8Config, PrecisionConfig
from app.plan.cost.flops import parameter_count, run_flops_per_token
from app.plan.formatting import GIB, amount, count_of
from app.plan.parts.dispatcher import run_dispatcher, tokens_per_rank
from app.plan.sharding.frozen import counts
from app.planner.plan import Plan
from app.programs import command_name

SHOWN_PARTS = 4  # largest parts of the memory shown


def summary_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the plan as (heading, text): model, layout, schedule, dispatch, step, run."""
    run = plan.run
    model = plan.run.model
    train = plan.run.train
    count = parameter_count(model)
    active = f", {amount(count.active)} used per token" if model.moe else ""
    size = f"{amount(count.total)} parameters{active}"
    if run.freezes:
        trained, frozen = counts(run)
        size += f", {amount(trained)} trained and {amount(frozen)} frozen"
    yield "model", f"{model.name}: {size}, {model.num_layers} layers, {types(run.precision)}"
    yield "layout", f"{count_of(run.world_size, 'process', 'processes')}: {degrees(plan)}"
    if plan.layout.pp > 1:
        bubble = f"bubble {plan.timeline.bubble_fraction:.0%}"
        yield (
            "schedule",
            f"{plan.schedule_name.value}, {count_of(plan.stages.vpp, 'stage')} per rank, {bubble}",
        )
    dispatcher = run_dispatcher(run)
    if dispatcher and (told := dispatcher.summary(tokens_per_rank(run))):
        yield "dispatch", told
    tokens = train.global_batch * train.seq_len
    micro = (
        f"{count_of(run.num_microbatches, 'microbatch', 'microbatches')} of {train.micro_batch} "
        "per rank"
    )
    sequences = f"{count_of(train.global_batch, 'sequence')} of {train.seq_len:,}"
    yield "step", f"{tokens:,} tokens: {sequences}, {micro}"
    flops = run.steps * tokens * run_flops_per_token(run)
    seen = amount(run.steps * tokens)
    yield "run", f"{count_of(run.steps, 'step')}, {seen} tokens, {flops:.2e} FLOPs"


def types(precision: PrecisionConfig) -> str:
    """Return the type of parameters and the parts in FP8, as "bfloat16, linear in FP8 (delayed)".

    FP8 options without a recipe have no effect, which the text says.
    """
    params, fp8 = precision.params.value, precision.fp8
    if fp8.recipe is None:
        chosen = fp8 != Fp8Config()
        return f"{params}, nothing in FP8: no precision.fp8.recipe" if chosen else params
    parts = " and ".join(part.value for part in fp8.include)
    return f"{params}, {parts} in FP8 ({fp8.recipe.value})"


def degrees(plan: Plan) -> str:
    """Return the degrees of parallelism above 1, data parallelism always: "dp 2, tp 4"."""
    return ", ".join(f"{axis} {size}" for axis, size in degree_sizes(plan).items())


def degree_sizes(plan: Plan) -> dict[str, int]:
    """Return axis -> degree of parallelism, if above 1; dp always."""
    layout = plan.layout
    moe = plan.run.model.moe
    dense = {"dp": layout.dp, "tp": layout.tp, "cp": layout.cp, "pp": layout.pp}
    experts = {"ep": layout.ep, "etp": layout.expert_tp, "edp": layout.edp} if moe else {}
    return {axis: size for axis, size in (dense | experts).items() if size > 1 or axis == "dp"}


def memory_line(plan: Plan, gpu_memory: int) -> str:
    """Return the busiest rank's memory of `gpu_memory` bytes, with its largest parts."""
    busiest = plan.busiest
    largest = sorted(busiest.parts, key=lambda part: -part.bytes)[:SHOWN_PARTS]
    parts = ", ".join(f"{part.name} {part.bytes / GIB:.1f}" for part in largest)
    told = f"{busiest.total / GIB:.1f} GiB of {gpu_memory / GIB:.1f} expected: {parts}"
    return told + no_fit(plan, gpu_memory)


def no_fit(plan: Plan, gpu_memory: int) -> str:
    """Warn if the busiest rank needs more than `gpu_memory` bytes; empty if it does not."""
    if plan.busiest.total <= gpu_memory:
        return ""
    how = f"{command_name('plan')} with the same overrides says what to change"
    return f"; it will not fit: {how}"
