"""Rules that span sections of the configuration: small named functions in one tuple, applied before anything is built."""

from __future__ import annotations

from collections.abc import Callable

from app.choices import BadStep, Balance, CpComm, Decay, DispatcherKind, Dtype, GraphImpl, GraphScope, Recompute, ScheduleName
from app.config import Run
from app.errors import ConfigError, FirstOf, Instead, nearest_divisors, nearest_multiples
from app.plan.activations import captured_phases
from app.plan.layout import AXES
from app.plan.select import captured_layers, select_layout, select_schedule, select_stages
from app.plan.traffic import parts_side_by_side
from app.sizes import check_microbatches, check_sizes


def check_world(run: Run) -> None:
    """The dense degrees fill the world."""
    world, ranks = run.parallel.world_size, run.model_ranks
    if world and run.parallel.dp is None and world % ranks:
        rule = f"must be a multiple of tp × cp × pp = {run.parallel.tp} × {run.parallel.cp} × {run.parallel.pp} = {ranks}"
        raise ConfigError("parallel.world_size", world, rule, nearest_multiples(world, ranks))
    if world and run.dp * ranks != world:
        rule = f"{world} processes over tp × cp × pp = {ranks} ranks"
        whole = (world // ranks,) if world % ranks == 0 else ()
        raise ConfigError(
            "parallel.dp", run.dp, rule, (*whole, Instead(f"parallel.world_size={run.dp * ranks}"))
        )


def check_expert_parallel(run: Run) -> None:
    """The experts divide over ep ranks, and these over the ranks of a pipeline stage."""
    ep, moe = run.parallel.ep, run.model.moe
    if ep > 1 and moe is None:
        raise ConfigError("parallel.ep", ep, f"model={run.model.name} has no experts", 1)
    if moe is None:
        if run.parallel.etp is not None:
            raise ConfigError("parallel.etp", run.parallel.etp, f"model={run.model.name} has no experts", "null")
        return
    if moe.num_experts % ep:
        rule = f"must divide model.moe.num_experts={moe.num_experts}"
        raise ConfigError("parallel.ep", ep, rule, _shares(ep, moe.num_experts))
    etp = run.parallel.tp if run.parallel.etp is None else run.parallel.etp
    stage = run.world_size // run.parallel.pp
    if stage % etp:
        rule = f"must divide the {stage} ranks of a pipeline stage"
        raise ConfigError("parallel.etp", etp, rule, nearest_divisors(etp, stage))
    if stage % (ep * etp):
        whole = (Instead("parallel.etp=1"),) if etp > 1 and stage % ep == 0 else ()
        more = Instead(f"parallel.dp={run.dp * ep * etp}")
        near = (*nearest_divisors(ep, max(1, stage // etp)), *whole, more)
        what = f"the {stage} ranks of a pipeline stage" if run.parallel.pp > 1 else f"the world size {stage}"
        raise ConfigError("parallel.ep", ep, f"must divide {what}" + (f" over etp={etp}" if etp > 1 else ""), near)
    if ep * etp > 1 and moe.dispatcher is DispatcherKind.local:
        rule = f"parallel.{f'ep={ep}' if ep > 1 else f'etp={etp}'} needs an exchange between ranks"
        raise ConfigError(
            "model.moe.dispatcher", moe.dispatcher, rule, ("auto", "all_to_all", "all_gather")
        )
    if moe.ffn_hidden_size % etp:
        near = nearest_divisors(etp, moe.ffn_hidden_size)
        raise ConfigError("parallel.etp", etp, f"must divide model.moe.ffn_hidden_size={moe.ffn_hidden_size}", near)


def _shares(ep: int, num_experts: int) -> tuple[FirstOf, ...]:
    """Ranks that share the experts, in the world that there is or in one of as many ranks."""
    found = nearest_divisors(ep, num_experts)
    sides = ([n for n in each.candidates if isinstance(n, int)] for each in found)
    return tuple(
        FirstOf(one for n in side for one in (n, Instead(f"parallel.ep={n}", f"parallel.dp={n}")))
        for side in sides
    )


def check_tensor_parallel(run: Run) -> None:
    """Heads, widths and vocabulary divide over tp ranks."""
    model, tp = run.model, run.parallel.tp
    widths = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "vocab_size": model.vocab_size}
    if any(not model.is_moe_layer(layer) for layer in range(model.num_layers)):
        widths["ffn_hidden_size"] = model.ffn_hidden_size
    if model.moe and model.moe.shared_ffn_hidden_size:
        widths["moe.shared_ffn_hidden_size"] = model.moe.shared_ffn_hidden_size
    for name, width in widths.items():
        if width % tp:
            near = nearest_multiples(width, tp) if name == "vocab_size" else nearest_divisors(tp, width)
            key, value = (f"model.{name}", width) if name == "vocab_size" else ("parallel.tp", tp)
            rule = f"must be a multiple of parallel.tp={tp}" if name == "vocab_size" else f"must divide model.{name}={width}"
            raise ConfigError(key, value, rule, near)


def check_sequence(run: Run) -> None:
    """Every context-parallel rank has two equal parts of a sequence, and every tensor-parallel rank a share of them."""
    cp, tp, seq_len = run.parallel.cp, run.parallel.tp, run.train.seq_len
    parts = (2 * cp if cp > 1 else 1) * tp
    if seq_len % parts:
        rule = f"must be a multiple of {'2·cp' if cp > 1 else ''}{' × ' if cp > 1 and tp > 1 else ''}{'tp' if tp > 1 else ''}"
        raise ConfigError("train.seq_len", seq_len, f"{rule} = {parts}", nearest_multiples(seq_len, parts))


def check_context_parallel(run: Run) -> None:
    """Ranks that trade tokens for heads get whole heads, of those that tensor parallelism leaves them."""
    cp, tp, kind = run.parallel.cp, run.parallel.tp, run.parallel.cp_comm_type
    here = run.model.num_kv_heads // tp  # divides the query heads
    if cp > 1 and kind is CpComm.all_to_all and here % cp:
        over = f" over parallel.tp={tp}" if tp > 1 else ""
        rule = f"gives each of parallel.cp={cp} ranks whole heads, of model.num_kv_heads={run.model.num_kv_heads}{over}"
        raise ConfigError(
            "parallel.cp_comm_type",
            kind,
            rule,
            ("all_gather", *nearest_divisors(cp, here, "parallel.cp")),
        )


def check_layout(run: Run) -> None:
    """Ranks form one grid for dense layers and one for experts, in the same pipelines, with an expert's parts side by side."""
    layout, order = select_layout(run), run.parallel.order.lower().split("-")
    if run.model.moe and not parts_side_by_side(layout, order):
        rule = f"parts of experts (parallel.etp={layout.expert_tp}) lie between their shares (parallel.ep={layout.ep})"
        raise ConfigError("parallel.order", run.parallel.order, rule, "-".join(AXES))


def check_stages(run: Run) -> None:
    """Layers divide over the pipeline's stages."""
    stages = select_stages(run)
    name = select_schedule(run, stages)
    if name is ScheduleName.zero_bubble_v and stages.vpp != 2:
        raise ConfigError("parallel.vpp", stages.vpp, "schedule zero_bubble_v has two stages per rank", 2)
    if stages.vpp > 1 and name not in CHUNKED:
        near = ("interleaved", *_fewer_stages(run))
        raise ConfigError(
            "schedule.name", name, f"has one stage per rank, not vpp={stages.vpp}", near
        )
    if stages.vpp == 1 and name is ScheduleName.interleaved:
        rule = "schedule interleaved needs several stages per rank"
        raise ConfigError("parallel.vpp", 1, rule, (2, Instead("schedule=auto")))


def _one_stage(run: Run) -> tuple[str, ...]:
    """What gives every pipeline rank one stage."""
    if run.parallel.layout is not None:
        return ("parallel.layout=null", "parallel.vpp=1")
    return ("parallel.vpp=1",) if run.parallel.vpp > 1 else ()


def _fewer_stages(run: Run) -> tuple[Instead, ...]:
    return (Instead(*one),) if (one := _one_stage(run)) else ()


def _whole() -> Instead:
    return Instead("cuda_graph=full_iteration")


def check_schedule_choice(run: Run) -> None:
    """The schedule exists for this many pipeline ranks, stages and microbatches."""
    name, pp, group = select_schedule(run, select_stages(run)), run.parallel.pp, run.schedule.group_size
    if name is ScheduleName.none and pp > 1:
        raise ConfigError(
            "schedule.name",
            name,
            f"runs on one pipeline rank, not on pp={pp}",
            ("auto", "1f1b", "interleaved"),
        )
    if group is not None and name is not ScheduleName.interleaved:
        raise ConfigError(
            "schedule.group_size",
            group,
            f"schedule {name.value} has no groups",
            ("null", Instead("schedule=interleaved")),
        )
    if name is not ScheduleName.interleaved:
        return
    if pp == 1:
        raise ConfigError(
            "schedule.name",
            name,
            "needs pipeline ranks, and parallel.pp=1",
            Instead("schedule=auto", *_one_stage(run)),
        )
    count = run.num_microbatches
    if count < pp:
        least = pp * run.train.micro_batch * run.dp
        rule = f"too few microbatches of {run.train.micro_batch} for dp={run.dp}: {count}, but interleaved needs pp={pp} or more"
        raise ConfigError(
            "train.global_batch",
            run.train.global_batch,
            rule,
            (least, Instead("schedule=1f1b", *_one_stage(run))),
        )
    size = pp if group is None else group
    legal = [n for n in range(pp, count + 1) if not 0 < count % n < pp]
    if size not in legal:
        rule = f"groups of {size} (null: pp) out of {count} microbatches must be between pp={pp} and {count}, the last one too"
        raise ConfigError(
            "schedule.group_size",
            group,
            rule,
            FirstOf(sorted(legal, key=lambda n: abs(n - size))[:8]),
        )


def check_graphs_choice(run: Run) -> None:
    """What is captured into CUDA graphs can be: no host wait inside, one contiguous part of a layer."""
    graph, moe = run.cuda_graph, run.model.moe
    scope, partial = set(graph.scope), graph.impl in (GraphImpl.local, GraphImpl.transformer_engine)
    named = "[" + ", ".join(part.value for part in graph.scope) + "]"
    key = "cuda_graph.scope"
    if scope and graph.impl in (GraphImpl.none, GraphImpl.full_iteration):
        raise ConfigError(
            key,
            named,
            f"impl={graph.impl.value} has no parts of layers",
            ("[]", Instead("cuda_graph.impl=local")),
        )
    if GraphScope.moe in scope and scope & {GraphScope.moe_router, GraphScope.moe_preprocess}:
        raise ConfigError(key, named, "moe holds moe_router and moe_preprocess already", "[attn, moe]")
    if GraphScope.moe_preprocess in scope and GraphScope.moe_router not in scope:
        raise ConfigError(key, named, "moe_preprocess follows moe_router, so it needs that", "[attn, moe_router, moe_preprocess]")
    if GraphScope.moe_router in scope and GraphScope.attn not in scope:
        raise ConfigError(key, named, "moe_router goes on from attn, so it needs that", "[attn, moe_router]")
    if partial and not captured_layers(run, range(run.model.num_layers)):
        raise ConfigError(key, named, f"model={run.model.name} has no such layers", "[attn]")
    whole = graph.impl is GraphImpl.full_iteration or (partial and not scope) or GraphScope.moe in scope
    ep, etp = select_layout(run).ep, select_layout(run).expert_tp
    if whole and graph.impl is not GraphImpl.none and moe and ep * etp > 1 and not moe.pad_to_capacity:
        degrees = f"ep={ep}" + (f" and etp={etp}" if etp > 1 else "")
        rule = f"captures the exchange of tokens, for whose sizes the host waits with {degrees}"
        what, value = ("cuda_graph.impl", graph.impl.value) if graph.impl is GraphImpl.full_iteration else (key, named)
        near = Instead("cuda_graph.impl=local", "cuda_graph.scope=[attn,moe_router,moe_preprocess]")
        raise ConfigError(what, value, rule, near)


INSIDE = {
    Recompute.attn_core: "attn",
    Recompute.mlp_act: "mlp",
    Recompute.experts_act: "experts",
    Recompute.shared: "shared",
    Recompute.moe: "finish",
}  # what may be recomputed with its random numbers -> the phase that it ends in


def check_graphs_beside(run: Run) -> None:
    """What is captured runs once per microbatch, from its forward to its backward, and ends before the rest of its layer."""
    graph, moe, again = run.cuda_graph, run.model.moe, run.recompute
    if graph.impl is GraphImpl.none:
        return
    scope, partial = set(graph.scope), graph.impl is not GraphImpl.full_iteration
    cuts_experts = partial and GraphScope.moe_router in scope
    if partial and run.schedule.name.value.startswith("zero_bubble"):
        rule = f"captures whole backwards, which schedule {run.schedule.name.value} splits"
        raise ConfigError(
            "cuda_graph.impl",
            graph.impl,
            rule,
            (_whole(), Instead("schedule=1f1b", *_one_stage(run))),
        )
    if partial and again.full:
        rule = f"runs every layer twice, and cuda_graph.impl={graph.impl.value} captures parts of them that run once"
        raise ConfigError("recompute.full", True, rule, (False, _whole()))
    if cuts_experts and Recompute.moe in again.phases:
        rule = "runs the router twice, and cuda_graph.scope=moe_router captures it to run once"
        raise ConfigError(
            "recompute.phases",
            Recompute.moe,
            rule,
            ("[experts_act]", Instead("cuda_graph.scope=[attn]")),
        )
    if cuts_experts and moe and moe.shared_overlap:
        rule = "goes on beside the experts, where cuda_graph.scope=moe_router has ended"
        raise ConfigError(
            "model.moe.shared_overlap", True, rule, (False, Instead("cuda_graph.scope=[attn]"))
        )
    held = captured_phases(graph) if partial else INSIDE.values()
    if moe and moe.jitter_eps and (again.full or any(INSIDE.get(part) in held for part in again.phases)):
        rule = "draws noise that recomputation has to draw again, which it cannot under capture"
        raise ConfigError(
            "model.moe.jitter_eps", moe.jitter_eps, rule, (0, Instead("recompute=none"))
        )


def check_recompute(run: Run) -> None:
    """What is computed twice must not count twice."""
    moe = run.model.moe
    if moe and moe.balance is Balance.global_batch and (run.recompute.full or Recompute.moe in run.recompute.phases):
        rule = "adds up the load of every forward, and backward would run some again under recompute.full or phases=[moe]"
        raise ConfigError("model.moe.balance", moe.balance, rule, ("microbatch", "sequence"))


def check_expert_widths(run: Run) -> None:
    """Grouped products need rows of whole 16-byte units."""
    if run.model.moe is None:
        return
    unit, etp = 4 if run.precision.params is Dtype.float32 else 8, select_layout(run).expert_tp
    for key, width, of in (
        ("model.hidden_size", run.model.hidden_size, unit),
        ("model.moe.ffn_hidden_size", run.model.moe.ffn_hidden_size, unit * etp),
    ):
        if width % of:
            raise ConfigError(
                key, width, f"experts in {run.precision.params.value} need a multiple of {of}", nearest_multiples(width, of)
            )


def check_batch(run: Run) -> None:
    """The global batch is a whole number of microbatches on every data-parallel rank."""
    per_step = run.train.micro_batch * run.dp
    if run.train.global_batch % per_step:
        raise ConfigError(
            "train.global_batch",
            run.train.global_batch,
            f"must be a multiple of micro_batch × dp = {run.train.micro_batch} × {run.dp} = {per_step}",
            (*nearest_multiples(run.train.global_batch, per_step), *_batch_of(run)),
        )


def _batch_of(run: Run) -> tuple[FirstOf, ...]:
    """Fewer replicas, which the batch can be cut over."""
    whole, rest = divmod(run.train.global_batch, run.train.micro_batch)
    return () if rest or not run.parallel.dp else nearest_divisors(run.dp, whole, "parallel.dp")[:1]


def check_lr_schedule(run: Run) -> None:
    """Warm-up and the last decay fit into the decay steps; all are counted in samples, which are whole."""
    lengths = run.warmup_steps, run.wsd_decay_steps, run.decay_steps
    warmup, last, whole = (round(steps * run.train.global_batch) for steps in lengths)
    if warmup >= whole:
        word, size = _unit(run, "warmup")
        rule = f"must be below the {whole / size:.10g} decay {word}"
        raise ConfigError(f"optim.warmup_{word}", warmup // size, rule, whole // size // 10)
    if run.optim.decay is Decay.wsd and warmup + last > whole:
        word, size = _unit(run, "wsd_decay")
        rule = f"with {warmup / size:.10g} {word} of warm-up longer than the {whole / size:.10g} decay {word}"
        room = (whole - warmup) // size
        advice = None if room else "make the decay longer"
        raise ConfigError(
            f"optim.wsd_decay_{word}", last // size, rule, room or None, advice=advice
        )


def _unit(run: Run, name: str) -> tuple[str, int]:
    """What a length of the schedule was given in, and samples in one."""
    return ("steps", run.train.global_batch) if getattr(run.optim, f"{name}_samples") is None else ("samples", 1)


def check_rollback(run: Run) -> None:
    """Going back needs something to go back to."""
    if run.train.on_bad_step is BadStep.rollback and not run.checkpoint.interval:
        rule = "goes back to checkpoints, and checkpoint.interval=0 saves none"
        raise ConfigError(
            "train.on_bad_step",
            run.train.on_bad_step,
            rule,
            ("skip", Instead("checkpoint=default")),
        )


CHUNKED = (ScheduleName.interleaved, ScheduleName.zero_bubble_v)  # schedules of several stages per rank
RULES: tuple[Callable[[Run], None], ...] = (
    check_sizes,
    check_world,
    check_expert_parallel,
    check_tensor_parallel,
    check_sequence,
    check_context_parallel,
    check_layout,
    check_recompute,
    check_expert_widths,
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
    """Refuse what can be planned but not yet trained; returns the run unchanged or raises ConfigError."""
    for key, values in TRAINED.items():
        section, name = key.split(".")
        value = getattr(getattr(run, section), name)
        if value not in values:
            shown = [getattr(part, "value", part) for part in value] if isinstance(value, tuple) else value
            rule = "can be planned (python -m app.cli.plan), but training does not do it yet"
            raise ConfigError(key, shown, rule, values)
    return run
