"""Rules on parameters that are not trained."""

from __future__ import annotations

from app.choices import GraphImpl
from app.config import Run
from app.errors import ConfigError, Instead, nearest
from app.plan.model.stage import model_weights
from app.plan.sharding.frozen import KEEPS, frozen_in, names_of

KEY = "train.frozen"
FUSED = {"wqkv": "queries, keys and values", "w_up": "gate and up projections"}


def check_frozen(run: Run) -> None:
    """Refuse patterns that change nothing, runs that train nothing, and what cannot be frozen."""
    patterns, saves = run.train.frozen, run.checkpoint.frozen
    if not patterns:
        if not saves and not run.freezes:
            rule = f"leaves out frozen parameters, and {KEY} names none"
            raise ConfigError("checkpoint.frozen", False, rule, nearest=True)
        if run.freezes:
            _check_beside(run, frozen_in(run))
        return
    names = [each.name for each in model_weights(run.model)]
    if patterns[0].startswith(KEEPS):
        rule = f"{patterns[0]} trains what an earlier pattern has frozen, and it is the first"
        advice = f"write for example {KEY}=['*','{patterns[0]}']"
        raise ConfigError(KEY, patterns, rule, advice=advice)
    for pattern in patterns:
        if not names_of(pattern, names):
            raise _no_match(run, pattern, names)
    frozen = frozen_in(run)
    if len(frozen) == len(names):
        rule = "freezes every parameter, and leaves nothing to train"
        advice = f"train some with a pattern such as '{KEEPS}head', or use python evaluate.py"
        raise ConfigError(KEY, patterns, rule, advice=advice)
    _check_beside(run, frozen)


def _no_match(run: Run, pattern: str, names: list[str]) -> ConfigError:
    """Return the refusal of a pattern that matches no parameter."""
    bare = pattern.removeprefix(KEEPS)
    parts = sorted({name.split(".", 2)[-1] for name in names})
    rule = f"{pattern} matches no parameter of {run.model.name}"
    if bare == "head" and run.model.tie_embeddings:
        rule += ", whose head is its embedding"
        return ConfigError(KEY, run.train.frozen, rule, guess="embedding")
    last = bare.rpartition(".")[2]
    guess = nearest(bare, names) or nearest(last, parts)
    listed = sorted({name.rpartition(".")[0].split(".", 2)[-1] or name for name in names})
    fused = ", ".join(
        f"{name} holds {what} together"
        for name, what in FUSED.items()
        if any(each.endswith(f".{name}") for each in names)
    )
    advice = f"names are {', '.join(parts if len(parts) < 20 else listed)}; {fused}"
    return ConfigError(KEY, run.train.frozen, rule, guess=guess, advice=advice)


def _check_beside(run: Run, frozen: frozenset[str]) -> None:
    """Refuse options that cannot be combined with these frozen parameters."""
    key = KEY if run.train.frozen else "lora.rank"
    run.model.check_frozen(key)
    if run.cuda_graph.impl is GraphImpl.transformer_engine:
        rule = f"captures gradients of all parameters of a layer, and {key} leaves some without"
        near = Instead("cuda_graph.impl=local")
        raise ConfigError("cuda_graph.impl", run.cuda_graph.impl, rule, nearest=near)
    if run.checkpoint.export_hf and not run.checkpoint.frozen:
        rule = "is made from a checkpoint, and checkpoint.frozen=false leaves weights out of it"
        whole = (False, Instead("checkpoint.frozen=true"))
        raise ConfigError("checkpoint.export_hf", True, rule, nearest=whole)
    moe = run.model.moe
    if moe is None or not moe.echo.spares:
        return
    for name in frozen:
        path, _, last = name.rpartition(".")
        other = {"w_up": "w_down", "w_down": "w_up"}.get(last)
        if path.endswith("experts") and other and f"{path}.{other}" not in frozen:
            rule = f"returns gradients of both matrices of an expert, and of {path} only {other}'s"
            advice = f"freeze {path} as a whole, or train it"
            raise ConfigError("model.moe.echo.spares", moe.echo.spares, rule, advice=advice)
