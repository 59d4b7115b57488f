"""Find typed options whose keys an experiment overrides: `+experiment=` is merged last."""

from __future__ import annotations

from collections.abc import Iterator

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from app.cli.options.arguments import CONFIG_NAME, Typed, key_of
from app.cli.options.keys import default_of
from app.cli.run_report.facts import flat
from app.errors import typed as as_typed

SHOWN = 3  # keys of one group
TOKENIZER = "data.tokenizer"  # goes with the model: options of data leave it open


def overlaid(typed: Typed) -> list[str]:
    """Return a line for each typed option of which the typed experiment changes keys."""
    experiments = [each for each in typed.overrides if key_of(each) == "experiment"]
    chosen = [each for each in typed.overrides if _is_choice(each)]
    if not experiments or not chosen:
        return []
    # Without keys: a key may be one of a section that the experiment alone brings.
    options = [each for each in typed.overrides if each in chosen or _is_of_hydra(each)]
    with typed.looked_up():
        name = typed.config_name or CONFIG_NAME
        whole = compose(name, list(typed.overrides))
        alone = compose(name, options)
    own = tuple(key_of(each) for each in typed.overrides if each not in options)
    lines = []
    for choice in chosen:
        changed = list(_changed(alone, whole, key_of(choice), own))
        if changed:
            more = " …" if len(changed) > SHOWN else ""
            shown = " ".join(changed[:SHOWN])
            by = " ".join(experiments)
            over = f"{by} sets {shown}{more} over it"
            lines.append(f"{choice}: {over}; keys that are typed count over both")
    return lines


def _is_of_hydra(override: str) -> bool:
    """Return whether an override concerns Hydra itself, such as folders of options."""
    return key_of(override).startswith("hydra")


def _is_choice(override: str) -> bool:
    """Return whether an override chooses an option of a group."""
    key, _, value = override.partition("=")
    return bool(value) and key.isidentifier() and key not in ("experiment", "run_dir", "resume")


def _section(config: DictConfig, name: str) -> object:
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict), "a whole configuration has sections"
    return values[name]


def _changed(
    alone: DictConfig, whole: DictConfig, section: str, typed: tuple[str, ...]
) -> Iterator[str]:
    """Yield the keys of a section that differ, as key=value, except typed ones and
    references to others."""
    before, after = (_section(config, section) for config in (alone, whole))
    if not isinstance(before, dict) or not isinstance(after, dict):
        return
    was = dict(flat(before, f"{section}."))
    for key, value in flat(after, f"{section}."):
        if any(key == own or key.startswith(f"{own}.") for own in typed):
            continue
        if isinstance(value, str) and value.startswith("${"):  # it follows what is typed
            continue
        if key == TOKENIZER and was[key] == default_of(key):
            continue
        if key not in was or was[key] != value:
            yield f"{key}={as_typed(value)}"
