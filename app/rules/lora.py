"""Rules on adapters."""

from __future__ import annotations

from app.choices import BaseKind, OptimizerKind
from app.config import LoraConfig, Run
from app.errors import ConfigError, Instead, nearest, nearest_multiples
from app.plan.layout import select_layout
from app.plan.model.held import BLOCKS, is_held
from app.plan.model.layer import LayerWeights
from app.plan.model.lora import chosen, linears_within
from app.plan.model.stage import model_weights
from app.plan.parts.trace import BYTES
from app.plan.sharding.blocks import ShardCoords

GEMM_BYTES = 16  # of a row of experts' matrices, which grouped GEMMs need


def check_lora(run: Run) -> None:
    """Refuse targets that no layer has, and what adapters cannot be combined with."""
    lora = run.lora
    if lora.rank is None:
        for name in ("targets", "init_from", "alpha", "rslora", "dropout", "base"):
            usual = getattr(LoraConfig(), name)
            if getattr(lora, name) != usual:
                near = (Instead("lora.rank=16"), usual)
                rule = "has no effect without lora.rank"
                raise ConfigError(f"lora.{name}", getattr(lora, name), rule, nearest=near)
        return
    linears = linears_of(run)
    for target in lora.targets:
        if not any(chosen(linear, (target,)) for linear in linears):
            words = sorted({word for linear in linears for word in linear.split(".")})
            rule = f"{target} is no linear layer of {run.model.name}"
            guess, advice = nearest(target, words), f"names are {', '.join(words)}"
            raise ConfigError("lora.targets", lora.targets, rule, guess=guess, advice=advice)
    _check_beside(run, lora.rank)
    if lora.base is not None:
        _check_base(run, lora.base)


def linears_of(run: Run) -> set[str]:
    """Return the linear layers of a run's model that may have adapters."""
    targets, found = run.lora.targets, set[str]()
    for spec in set(run.model.layer_specs):
        found |= linears_within(LayerWeights.of(run.model, spec), targets)
    return found


def _check_beside(run: Run, rank: int) -> None:
    """Refuse options that cannot be combined with adapters."""
    without = Instead("lora.rank=null")
    if run.train.frozen:
        rule = "names parameters, and with lora.rank adapters alone are trained"
        raise ConfigError("train.frozen", run.train.frozen, rule, nearest=((), without))
    if run.optim.name is not OptimizerKind.adamw:
        rule = "updates matrices of the model, and with lora.rank adapters alone are trained"
        raise ConfigError(
            "optim.name", run.optim.name, rule, nearest=(OptimizerKind.adamw, without)
        )
    if run.precision.fp8.recipe is not None:
        rule = "does not run with adapters (lora.rank)"
        raise ConfigError(
            "precision.fp8.recipe", run.precision.fp8.recipe, rule, nearest=("null", without)
        )
    adapted = [named for named in model_weights(run.model, run.lora) if named.weight.adapters]
    if run.lora.dropout and not all(named.weight.linear for named in adapted):
        raise _no_dropout(run, "routers")
    moe = run.model.moe
    if moe is None or not any(named.weight.expert for named in adapted):
        return
    if run.lora.dropout:
        raise _no_dropout(run, "experts")
    if moe.echo.spares:
        rule = "copies experts without their adapters (lora.targets)"
        near = (0, Instead("lora.targets=[self_attn]"))
        raise ConfigError("model.moe.echo.spares", moe.echo.spares, rule, nearest=near)
    if moe.static.paged_buffer is not None:
        rule = "does not hold what adapters of experts save (lora.targets)"
        raise ConfigError(
            "model.moe.static.paged_buffer",
            moe.static.paged_buffer,
            rule,
            nearest=("null", Instead("lora.targets=[self_attn]")),
        )
    of = GEMM_BYTES // BYTES[run.precision.params]
    if rank % of:
        rule = f"must be a multiple of {of} for experts: grouped GEMMs read {GEMM_BYTES} bytes"
        raise ConfigError("lora.rank", rank, rule, nearest=nearest_multiples(rank, of))


def _no_dropout(run: Run, what: str) -> ConfigError:
    rule = f"drops inputs of linear layers, and lora.targets adapt {what}: `peft` refuses this too"
    near = (0, Instead("lora.targets=[self_attn]"))
    return ConfigError("lora.dropout", run.lora.dropout, rule, nearest=near)


def _check_base(run: Run, base: BaseKind) -> None:
    """Refuse to hold frozen layers in fewer bits where they are saved, moved, or cut within a
    block of values.
    """
    if run.checkpoint.frozen:
        rule = "is dequantised for GEMMs alone, and checkpoint.frozen=true saves whole weights"
        near = (None, Instead("checkpoint.frozen=false"))
        raise ConfigError("lora.base", base, rule, nearest=near)
    moe, block = run.model.moe, BLOCKS[base]
    if moe is not None and moe.echo.spares:
        rule = "holds experts in fewer bits, which model.moe.echo.spares does not send"
        near = (None, Instead("model.moe.echo.spares=0"))
        raise ConfigError("lora.base", base, rule, nearest=near)
    coords = ShardCoords.of(select_layout(run), 0)
    for named in model_weights(run.model):
        width = coords.block(named.weight).sizes[-1]
        if is_held(named.weight) and width % block:
            rule = f"has a scale per {block} values, and a rank has rows of {width} of {named.name}"
            raise ConfigError("lora.base", base, rule, nearest=None)
