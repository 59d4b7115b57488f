"""Notice a published model that would be trained at the learning rate of random weights."""

from __future__ import annotations

from collections.abc import Iterator

from app.cli.options.arguments import Typed, key_of
from app.cli.options.continued import RunSettings
from app.config import OptimConfig, Run
from app.errors import typed as as_typed

RATE = "optim.lr"
EXPERIMENTS = ("finetune", "finetune_lora")


def usual_rate(run: Run, typed: Typed) -> Iterator[str]:
    """Yield a line for a run that starts from a model and leaves the learning rate to the default;
    none if it was typed, chosen by an experiment, or is that of a run that is continued.
    """
    if run.model.init_from is None or run.optim.lr != OptimConfig().lr:
        return
    if RATE in map(key_of, typed.overrides) or RunSettings.of(typed) is not None:
        return
    named = " or ".join(f"+experiment={name}" for name in EXPERIMENTS)
    yield (
        f"{RATE}={as_typed(run.optim.lr)} is the default, for random weights, and far too high for "
        f"those of model.init_from: type {RATE} and optim.min_lr, or begin with {named}"
    )
