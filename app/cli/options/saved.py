"""Build the run in which a trained model is used: the model of its checkpoint in a new layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from app.cli.options.compose import load_run, run_schema
from app.cli.options.old_names import with_present_names
from app.config import ModelConfig, Run
from app.config.model import TRAINING_ALONE
from app.engine.files.signals import ctrl_c_held_back
from app.errors import ConfigError, FirstOf, typed
from app.plan.model.stage import model_weights

# how experts are reached, what limits them in training, and losses of routers
OF_TRAINING = ("dispatcher", "static", "echo", "pad_to_capacity", "capacity_factor",
               "force_balance", "shared_overlap", "aux_loss_coeff", "z_loss_coeff")  # fmt: skip
NO_LOSSES = {"aux_loss_coeff": 0.0, "z_loss_coeff": 0.0}


@ctrl_c_held_back()
def saved_run(config: dict[str, Any], overrides: Sequence[str], world_size: int | None) -> Run:
    """Return the run of a checkpoint's configuration with overrides.

    Of the configuration it takes the model, its data and number types, and the length of sequences;
    all else is as by default: one process, dropless experts. `world_size`: processes that a
    launcher has started; None: none has. Raises ConfigError, also for overrides with which the
    weights would have other shapes, and what Hydra and OmegaConf raise.
    """
    model = {**config["model"], **TRAINING_ALONE}
    if model["moe"] is not None:
        model["moe"] = NO_LOSSES | {
            name: value for name, value in model["moe"].items() if name not in OF_TRAINING
        }
    kept = {
        "model": model,
        "data": config["data"],
        "precision": {"params": config["precision"]["params"]},
        "train": {"seq_len": config["train"]["seq_len"], "micro_batch": 1},
    }
    merged = OmegaConf.merge(run_schema(), kept)
    assert isinstance(merged, DictConfig)
    shapes = _shapes(merged)
    for override in OverridesParser.create().parse_overrides([*with_present_names(overrides)]):
        key, value = override.key_or_group, override.value()
        was = OmegaConf.select(merged, key)
        nearest = None if isinstance(was, DictConfig) else FirstOf([was])
        said = "such a section" if nearest is None else typed(was)
        OmegaConf.update(merged, key, value)
        if key.startswith("model.") and _shapes(merged) != shapes:
            raise ConfigError(
                key, value, f"the weights are of a model with {said}", nearest=nearest
            )
    parallel = merged.parallel
    ranks = world_size or parallel.world_size or parallel.tp * parallel.cp * parallel.pp
    replicas = parallel.dp or 1
    # a batch of training that every layout of so many ranks divides
    merged.train.global_batch = ranks**2 * replicas
    return load_run(merged, world_size)


def _shapes(config: DictConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of all weights of a configuration's model."""
    model = OmegaConf.to_object(config.model)
    assert isinstance(model, ModelConfig)
    return {each.name: each.weight.shape for each in model_weights(model)}
