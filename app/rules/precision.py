"""Rules on FP8 GEMMs."""

from __future__ import annotations

from app.choices import Dtype, Fp8Part, LinearBackendKind
from app.config import Run
from app.errors import ConfigError, FirstOf, Instead
from app.plan.model.fp8 import MULTIPLE, fp8_weights, part_of
from app.plan.sharding.blocks import ShardCoords
from app.plan.stages import Stage


def check_fp8(run: Run) -> None:
    """Refuse FP8 where it cannot be computed, or where it would apply to nothing."""
    fp8 = run.precision.fp8
    if fp8.recipe is None:
        return
    key = "precision.fp8.recipe"
    if run.precision.params is Dtype.float16:
        rule = "needs parameters in bfloat16: float16 gradients have a loss scale of their own"
        raise ConfigError(key, fp8.recipe, rule, nearest=(None, Instead("precision=bf16")))
    linear = Fp8Part.linear in fp8.include
    moe = run.model.moe
    if linear and moe and moe.shared_overlap and moe.shared_ffn_hidden_size:
        rule = (
            "runs the shared expert beside the routed ones, and FP8 GEMMs "
            "(precision.fp8.include=[linear]) share one workspace"
        )
        raise ConfigError("model.moe.shared_overlap", True, rule, nearest=False)
    _check_experts(run)
    left_out = fp8.first_layers + fp8.last_layers
    if fp8.include != (Fp8Part.head,) and left_out >= run.model.num_layers:
        # blame the larger one; the other may stay
        other, name = sorted(("first_layers", "last_layers"), key=lambda name: getattr(fp8, name))
        kept = getattr(fp8, other)
        rule = f"with {other}={kept} leaves none of {run.model.num_layers} layers in FP8"
        room = run.model.num_layers - kept - 1
        near = (room,) if room >= 0 else ()
        raise ConfigError(f"precision.fp8.{name}", getattr(fp8, name), rule, nearest=near)
    _check_widths(run)


def _check_experts(run: Run) -> None:
    """Refuse FP8 experts in a dense model, or together with clones of experts."""
    fp8, moe = run.precision.fp8, run.model.moe
    if Fp8Part.experts not in fp8.include:
        return
    rest = tuple(part for part in fp8.include if part is not Fp8Part.experts)
    near: tuple[object, ...] = (rest or (Fp8Part.linear,),)
    if moe is None:
        rule = "asks for routed experts, and this model has none"
        raise ConfigError("precision.fp8.include", fp8.include, rule, nearest=near)
    if moe.echo.spares:
        rule = (
            "clones experts in the type of parameters, and not in FP8 "
            "(precision.fp8.include=[experts])"
        )
        key = "model.moe.echo.spares"
        raise ConfigError(key, moe.echo.spares, rule, nearest=0)
    if fp8.backend is LinearBackendKind.transformer_engine and not fp8.by_library:
        rule = "computes linear layers and the head, and precision.fp8.include has neither"
        key = "precision.fp8.backend"
        raise ConfigError(key, fp8.backend, rule, nearest=LinearBackendKind.auto)


def _check_widths(run: Run) -> None:
    """Refuse matrices whose widths on a rank are not a multiple of what tensor cores load."""
    tp = run.parallel.tp
    etp = tp if run.parallel.etp is None else run.parallel.etp
    fp8 = run.precision.fp8
    stage = Stage(tuple(range(run.model.num_layers)), embedding=True, head=True)
    for named in fp8_weights(run.model, fp8, stage):
        rows, columns = ShardCoords(tp=(0, tp), etp=(0, etp)).shape(named.weight)[-2:]
        if not (rows % MULTIPLE or columns % MULTIPLE):
            continue
        axis, ranks = ("tp", tp) if named.weight.ep is None else ("etp", etp)
        of_rank = f" on each of {axis}={ranks} ranks" if ranks > 1 else ""
        head = part_of(named) is Fp8Part.head
        called = named.name
        if head:
            called = f"the head ({named.name})" if run.model.tie_embeddings else "the head"
        rule = (
            f"widths of a matrix in FP8 are multiples of {MULTIPLE}, and {called} has "
            f"{rows} × {columns}{of_rank}"
        )
        off = Instead("precision.fp8.recipe=null")
        rest = tuple(part for part in fp8.include if part is not part_of(named))
        others = ((part,) for part in Fp8Part if part not in fp8.include)
        whole = MULTIPLE * tp
        filled = -(-run.model.vocab_size // whole) * whole
        more_ids = [Instead(f"model.vocab_size={filled}")] if head and rows % MULTIPLE else []
        near = (FirstOf(more_ids), FirstOf([rest] if rest else others), off)
        raise ConfigError("precision.fp8.include", fp8.include, rule, nearest=near)
