"""Rules on degrees of parallelism, and on the dimensions that their ranks divide."""

from __future__ import annotations

from dataclasses import fields

from app.choices import CloneAlgorithm, CpComm, Device, DispatcherKind, Dtype, StaticCapacity
from app.config import Run
from app.config.experts import EchoConfig, StaticConfig
from app.errors import ConfigError, FirstOf, Instead, nearest_divisors, nearest_multiples
from app.plan.cost.traffic import parts_side_by_side
from app.plan.layout import AXES, select_layout
from app.plan.parts.dispatcher import (
    kinds_between_ranks,
    planned_dispatcher,
    run_dispatcher,
)
from app.plan.parts.static import MOST_IDS, PlannedStatic


def check_world(run: Run) -> None:
    """Refuse dense degrees that do not multiply to the world size."""
    world = run.parallel.world_size
    ranks = run.model_ranks
    if world and run.parallel.dp is None and world % ranks:
        rule = (
            f"must be a multiple of tp × cp × pp = {run.parallel.tp} × {run.parallel.cp} × "
            f"{run.parallel.pp} = {ranks}"
        )
        raise ConfigError("parallel.world_size", world, rule, nearest=_degrees_of(run, world))
    if world and run.dp * ranks != world:
        rule = f"{world} processes over tp × cp × pp = {ranks} ranks"
        whole = (world // ranks,) if world % ranks == 0 else ()
        raise ConfigError(
            "parallel.dp",
            run.dp,
            rule,
            nearest=(*whole, Instead(f"parallel.world_size={run.dp * ranks}")),
        )


def _degrees_of(run: Run, world: int) -> tuple[FirstOf, ...]:
    """Return other degrees with which the dense degrees fill the world."""
    found: tuple[FirstOf, ...] = ()
    for axis in ("pp", "cp", "tp"):
        degree = getattr(run.parallel, axis)
        share, rest = divmod(world, run.model_ranks // degree)
        if degree > 1 and not rest:
            found += nearest_divisors(degree, share, f"parallel.{axis}")
    return found


def check_expert_parallel(run: Run) -> None:
    """Refuse ep that does not divide the experts, or ep × etp that does not divide a stage's
    ranks.
    """
    ep = run.parallel.ep
    moe = run.model.moe
    if ep > 1 and moe is None:
        raise ConfigError("parallel.ep", ep, f"model={run.model.name} has no experts", nearest=1)
    if moe is None:
        if run.parallel.etp is not None:
            raise ConfigError(
                "parallel.etp",
                run.parallel.etp,
                f"model={run.model.name} has no experts",
                nearest="null",
            )
        return
    if moe.num_experts % ep:
        rule = f"must divide model.moe.num_experts={moe.num_experts}"
        raise ConfigError("parallel.ep", ep, rule, nearest=_shares(ep, moe.num_experts))
    etp = run.parallel.tp if run.parallel.etp is None else run.parallel.etp
    stage = run.world_size // run.parallel.pp
    if stage % etp:
        rule = f"must divide the {stage} ranks of a pipeline stage"
        raise ConfigError("parallel.etp", etp, rule, nearest=nearest_divisors(etp, stage))
    if stage % (ep * etp):
        whole = (Instead("parallel.etp=1"),) if etp > 1 and stage % ep == 0 else ()
        more = Instead(f"parallel.dp={run.dp * ep * etp}")
        near = (*nearest_divisors(ep, max(1, stage // etp)), *whole, more)
        what = f"the world size {stage}"
        if run.parallel.pp > 1:
            what = f"the {stage} ranks of a pipeline stage"
        raise ConfigError(
            "parallel.ep",
            ep,
            f"must divide {what}" + (f" over etp={etp}" if etp > 1 else ""),
            nearest=near,
        )
    if not planned_dispatcher(moe, ep, etp).legal:
        rule = f"parallel.{f'ep={ep}' if ep > 1 else f'etp={etp}'} sends tokens between ranks"
        raise ConfigError(
            "model.moe.dispatcher",
            moe.dispatcher,
            rule,
            nearest=kinds_between_ranks(),
        )
    if moe.ffn_hidden_size % etp:
        near = nearest_divisors(etp, moe.ffn_hidden_size)
        raise ConfigError(
            "parallel.etp",
            etp,
            f"must divide model.moe.ffn_hidden_size={moe.ffn_hidden_size}",
            nearest=near,
        )


def check_static_dispatch(run: Run) -> None:
    """Refuse options of dispatcher=static that have no effect, or that its ranks cannot have."""
    moe = run.model.moe
    if moe is None:
        return
    static = moe.static
    section = "model.moe.static"
    for field in fields(StaticConfig):
        value = getattr(static, field.name)
        if moe.dispatcher is not DispatcherKind.static and value != field.default:
            rule = f"is for dispatcher=static, not {moe.dispatcher.value}"
            near = (field.default, Instead("model.moe.dispatcher=static"))
            raise ConfigError(f"{section}.{field.name}", value, rule, nearest=near)
    limited = static.capacity is StaticCapacity.factor
    if not limited and static.factor != StaticConfig.factor:
        rule = f"is for capacity=factor, not {static.capacity.value}"
        near = (StaticConfig.factor, Instead(f"{section}.capacity=factor"))
        raise ConfigError(f"{section}.factor", static.factor, rule, nearest=near)
    dispatcher = run_dispatcher(run)
    if not isinstance(dispatcher, PlannedStatic) or not dispatcher.peer:
        return
    key = f"{section}.transport"
    if not dispatcher.one_node:
        cpu = run.train.device is Device.cpu
        rule = "is for GPUs" if cpu else f"the {dispatcher.ranks} ranks lie in several nodes"
        raise ConfigError(key, static.transport, rule, nearest="collective")
    if dispatcher.ranks * dispatcher.experts > MOST_IDS:
        rule = f"takes at most {MOST_IDS} experts and slots for clones"
        raise ConfigError(key, static.transport, rule, nearest="collective")


def check_clones(run: Run) -> None:
    """Refuse clones of experts without other ranks, or without a dispatcher that serves them."""
    moe = run.model.moe
    if moe is None:
        return
    echo, section = moe.echo, "model.moe.echo"
    if not echo.spares:
        _check_unused(echo, section)
        return
    key = f"{section}.spares"
    dispatcher = run_dispatcher(run)
    if run.parallel.ep == 1:
        rule = "parallel.ep=1: no other rank has experts to be cloned"
        raise ConfigError(key, echo.spares, rule, nearest=(Instead("parallel.ep=2"), 0))
    if not isinstance(dispatcher, PlannedStatic):
        rule = f"is for dispatcher=static, not {moe.dispatcher.value}"
        near = (Instead("model.moe.dispatcher=static"), 0)
        raise ConfigError(key, echo.spares, rule, nearest=near)
    if dispatcher.etp > 1:
        rule = f"clones whole experts, and parallel.etp={dispatcher.etp} divides each of them"
        raise ConfigError(key, echo.spares, rule, nearest=(Instead("parallel.etp=1"), 0))
    if moe.expert_bias:
        rule = "clones carry no biases, and model.moe.expert_bias=true"
        raise ConfigError(key, echo.spares, rule, nearest=0)
    if echo.threshold > dispatcher.ep - 1:
        key, most_above = f"{section}.threshold", dispatcher.ep - 1
        rule = f"with parallel.ep={dispatcher.ep} no rank has more than that above the mean"
        raise ConfigError(key, echo.threshold, rule, nearest=most_above)
    most = moe.num_experts - dispatcher.own
    if echo.spares > most:
        rule = f"only {most} experts are on other ranks"
        raise ConfigError(key, echo.spares, rule, nearest=most)
    if echo.spares > 1 and echo.algorithm is CloneAlgorithm.approx_bin_packing:
        rule = "algorithm=approx_bin_packing fills one slot of a rank"
        near = (Instead(f"{section}.algorithm=target_search"), 1)
        raise ConfigError(key, echo.spares, rule, nearest=near)


def _check_unused(echo: EchoConfig, section: str) -> None:
    """Refuse other options of ECHO while there are no slots."""
    for field in fields(EchoConfig):
        if getattr(echo, field.name) != field.default:
            rule = "there are no slots for clones, spares=0"
            near = (Instead(f"{section}.spares=1"), field.default)
            key = f"{section}.{field.name}"
            raise ConfigError(key, getattr(echo, field.name), rule, nearest=near)


def _shares(ep: int, num_experts: int) -> tuple[FirstOf, ...]:
    """Return values of ep that divide the experts, in this world or with dp = ep."""
    found = nearest_divisors(ep, num_experts)
    sides = ([n for n in each.candidates if isinstance(n, int)] for each in found)
    return tuple(
        FirstOf(one for n in side for one in (n, Instead(f"parallel.ep={n}", f"parallel.dp={n}")))
        for side in sides
    )


def check_tensor_parallel(run: Run) -> None:
    """Refuse tp that does not divide heads, widths and vocabulary."""
    model = run.model
    tp = run.parallel.tp
    widths = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
    }
    if model.linear_attention is not None:
        widths["linear_attention.key_heads"] = model.linear_attention.key_heads
    if any(not model.is_moe_layer(layer) for layer in range(model.num_layers)):
        widths["ffn_hidden_size"] = model.ffn_hidden_size
    if model.moe and model.moe.shared_ffn_hidden_size:
        widths["moe.shared_ffn_hidden_size"] = model.moe.shared_ffn_hidden_size
    for name, width in widths.items():
        if width % tp == 0:
            continue
        if name == "vocab_size":
            rule = f"must be a multiple of parallel.tp={tp}"
            near = nearest_multiples(width, tp)
            raise ConfigError("model.vocab_size", width, rule, nearest=near)
        rule = f"must divide model.{name}={width}"
        raise ConfigError("parallel.tp", tp, rule, nearest=nearest_divisors(tp, width))


def check_sequence(run: Run) -> None:
    """Refuse sequences that do not divide over context- and tensor-parallel ranks.

    A context-parallel rank has two equal chunks of a sequence, so that causal attention is
    balanced; a tensor-parallel rank has a part of these.
    """
    cp = run.parallel.cp
    tp = run.parallel.tp
    seq_len = run.train.seq_len
    parts = (2 * cp if cp > 1 else 1) * tp
    if seq_len % parts:
        factors = [name for name, size in (("2·cp", cp), ("tp", tp)) if size > 1]
        rule = f"must be a multiple of {' × '.join(factors)}"
        raise ConfigError(
            "train.seq_len", seq_len, f"{rule} = {parts}", nearest=nearest_multiples(seq_len, parts)
        )


def check_context_parallel(run: Run) -> None:
    """Refuse all-to-all context parallelism that would split a head.

    cp must divide the key/value heads of a tensor-parallel rank.
    """
    cp = run.parallel.cp
    tp = run.parallel.tp
    if cp > 1 and run.model.linear_attention is not None:
        rule = (
            "linear attention passes its state from token to token, and a rank holds two chunks of "
            "a sequence that are not neighbours"
        )
        near = (1, *(Instead("parallel.cp=1", f"parallel.{axis}={cp}") for axis in ("tp", "dp")))
        raise ConfigError("parallel.cp", cp, rule, nearest=near)
    kind = run.parallel.cp_comm_type
    here = run.model.num_kv_heads // tp  # divides the query heads
    if cp > 1 and kind is CpComm.all_to_all and here % cp:
        over = f" over parallel.tp={tp}" if tp > 1 else ""
        rule = (
            f"gives each rank whole heads, so parallel.cp={cp} must divide "
            f"model.num_kv_heads={run.model.num_kv_heads}{over}"
        )
        raise ConfigError(
            "parallel.cp_comm_type",
            kind,
            rule,
            nearest=("all_gather", *nearest_divisors(cp, here, "parallel.cp")),
        )


def check_layout(run: Run) -> None:
    """Refuse grids of dense layers and experts that do not fit together.

    They must have the same pipelines, and the etp parts of an expert on adjacent ranks.
    """
    layout = select_layout(run)
    order = run.parallel.order.lower().split("-")
    if run.model.moe and not parts_side_by_side(layout, order):
        rule = (
            f"must list tp before ep: the parallel.etp={layout.expert_tp} parts of an expert are "
            f"on adjacent ranks (parallel.ep={layout.ep})"
        )
        raise ConfigError("parallel.order", run.parallel.order, rule, nearest="-".join(AXES))


def check_expert_widths(run: Run) -> None:
    """Refuse widths of experts whose rows are not a multiple of 16 bytes, as grouped GEMMs need."""
    if run.model.moe is None:
        return
    unit = 4 if run.precision.params is Dtype.float32 else 8  # elements in 16 bytes
    etp = select_layout(run).expert_tp
    for key, width, of in (
        ("model.hidden_size", run.model.hidden_size, unit),
        ("model.moe.ffn_hidden_size", run.model.moe.ffn_hidden_size, unit * etp),
    ):
        if width % of:
            raise ConfigError(
                key,
                width,
                f"experts in {run.precision.params.value} need a multiple of {of}",
                nearest=nearest_multiples(width, of),
            )
