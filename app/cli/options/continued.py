"""Settings of a continued run: `resume=RUN`, or `resume=auto run_dir=RUN`, starts from those that
RUN has saved; typed overrides take precedence.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from app.choices import Fp8Recipe
from app.cli.options.arguments import CONFIG_NAME, Typed
from app.config.layout import OF_DELAYED
from app.config.renamed import with_new_names
from app.config.training import LENGTHS
from app.engine.files.checkpoints import CHECKPOINTS, MANIFEST, newest_checkpoint, parse_manifest
from app.engine.files.run_folder import CONFIG, HEADER, read_config
from app.engine.files.signals import ctrl_c_held_back
from app.errors import ConfigError
from app.planner.attention import AUTO
from app.shell import literal

ACCEPTED = "data.accept_changed"
# Of one start of a run: where it wrote, what it came from, and data that it has accepted.
OF_ONE_START = frozenset({"run_dir", "resume", ACCEPTED})
OF_ONE_RUN = OF_ONE_START | {"parallel.world_size"}  # likewise, for a run of its own
# What conf/train.yaml says to Hydra.
TO_HYDRA = (
    "hydra/hydra_logging=none",
    "hydra/job_logging=none",
    "hydra/sweeper=grid",
    "hydra/launcher=torchrun",
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra.job.chdir=false",
    "hydra.sweep.subdir=.",
)
TO_SWEEPS = "hydra.sweep.dir='sweeps/{name}'"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings that a run has saved."""

    file: Path  # they are read from
    values: dict[str, Any]  # by section, as plain data, by present names
    renamed: tuple[str, ...] = ()  # a line per old name in the file

    @classmethod
    def of(cls, typed: Typed) -> RunSettings | None:
        """Return the settings of the run that these arguments continue; None where there are none:
        the run is new or not named, or a whole configuration is named instead. Raises what
        Hydra's grammar raises.
        """
        if typed.config_name is not None or typed.config_path is not None:
            return None
        overrides = _parsed(typed.overrides)
        path = _named_run(overrides)
        return None if path is None else _read(path, [each.key_or_group for each in overrides])

    def beside(self, typed: Typed, known: Sequence[str], world_size: int | None) -> dict[str, Any]:
        """Return the settings for which nothing is typed, for the configuration to hold them.

        A section is left out whose option is chosen. Data-parallel ranks are as many as before;
        with a launcher, as many as its `world_size` processes make. `known` are all dotted keys.
        To be called where `typed.looked_up()`.
        """
        chosen = _chosen(typed)
        values = {
            name: copy.deepcopy(value) for name, value in self.values.items() if name not in chosen
        }
        _leave_out_unread(values)
        keys = {each.key_or_group for each in _parsed(typed.overrides)}
        if keys & {f"train.{name}" for name in LENGTHS} and isinstance(values.get("train"), dict):
            for name in LENGTHS:
                values["train"].pop(name, None)
        if isinstance(parallel := values.get("parallel"), dict):
            _set_replicas(parallel, world_size, anew="parallel.world_size" in keys)
        return dict(_kept(values, "", frozenset(known)))

    def unknown(self, known: Sequence[str]) -> list[str]:
        """Return dotted keys that this version of the program does not have."""
        return list(_unknown(self.values, "", frozenset(known)))


def words_for_plain(typed: Typed, sweeps: bool) -> list[str]:
    """Return what has to be typed beside `--config-name` of a file that is a list of settings and
    nothing else, such as a run's config.yaml: what conf/train.yaml says to Hydra, and for a run's
    own file that another run starts by itself. Empty for any other file.
    """
    file = _named_file(typed)
    values = None if file is None else _of_file(file)
    if file is None or values is None or "defaults" in values:
        return []
    words = [*TO_HYDRA, *([TO_SWEEPS] if sweeps else [])]
    if file.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
        words += (f"{key}=null" for key in sorted(OF_ONE_RUN - {ACCEPTED}))
        words.append(f"{ACCEPTED}=false")
        words += [AUTO] if AUTO in ((values.get("parallel") or {}).get("replaced") or ()) else []
    given = {each.lstrip("+").partition("=")[0] for each in typed.overrides}
    return [each for each in words if each.partition("=")[0] not in given]


def _named_file(typed: Typed) -> Path | None:
    """Return the YAML file that `--config-name` names, None where none is found."""
    folders = [typed.folder if typed.config_dir is None else Path(typed.config_dir), typed.folder]
    named = [folder / f"{typed.config_name}" for folder in folders]
    files = [path if path.suffix == ".yaml" else Path(f"{path}.yaml") for path in named]
    return next((path for path in files if typed.config_name and path.is_file()), None)


def _parsed(overrides: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(overrides))


def _named_run(overrides: Sequence[Override]) -> Path | None:
    """Return the run folder or checkpoint that is to be continued, where it is named."""
    resume = _text(overrides, "resume")
    named = _text(overrides, "run_dir") if resume == "auto" else resume
    return Path(named) if named else None


def _text(overrides: Sequence[Override], key: str) -> str | None:
    """Return the last value that is typed for a key; None for none, null, or several."""
    found = [each for each in overrides if each.key_or_group == key]
    if not found or found[-1].is_sweep_override() or found[-1].value() is None:
        return None
    try:
        return str(OmegaConf.create({key: found[-1].value()})[key])
    except OmegaConfBaseException:
        return None  # of an environment variable that is not set, as composing says


def _read(path: Path, keys: Collection[str]) -> RunSettings | None:
    """Read what a run, or one of its checkpoints, has saved; `keys` are typed beside."""
    if path.name.startswith("step-"):
        return _of_checkpoint(path, keys)
    folder = path.parent if path.name == CHECKPOINTS else path
    values = _of_file(folder / CONFIG)
    if values is not None:
        return _by_present_names(folder / CONFIG, values, keys)
    try:
        newest = newest_checkpoint(folder)
    except OSError:  # whoever looks for its checkpoint says so
        return None
    return None if newest is None else _of_checkpoint(newest, keys)


def _of_checkpoint(path: Path, keys: Collection[str]) -> RunSettings | None:
    try:
        values = parse_manifest(path, as_saved=True)["config"]
    except ConfigError:  # whoever loads it says so
        return None
    return _by_present_names(path / MANIFEST, values, keys)


def _by_present_names(file: Path, values: dict[str, Any], keys: Collection[str]) -> RunSettings:
    """Return saved settings by present names. Raises ConfigError for a removed key that the run
    depends on, unless the key that decides in its place is among those typed.
    """
    present, told = with_new_names(values, saved=True, typed_keys=keys)
    take_back(present)
    return RunSettings(file, present, tuple(told))


def take_back(values: dict[str, Any]) -> None:
    """Put settings back for which this program has chosen others: the next start chooses."""
    parallel = values.get("parallel")
    words = parallel.pop("replaced", None) or () if isinstance(parallel, dict) else ()
    for word in words if isinstance(words, list | tuple) else [words]:
        try:
            key, _, text = word.partition("=")
            *sections, name = key.split(".")
            section = values
            for each in sections:
                section = section[each]
            if name not in section:
                raise KeyError(name)
            section[name] = yaml.safe_load(text)
        except (AttributeError, LookupError, TypeError, yaml.YAMLError):
            rule = "is no setting for which others are chosen"
            raise ConfigError("parallel.replaced", word, rule) from None


@ctrl_c_held_back()
def _of_file(path: Path) -> dict[str, Any] | None:
    """Read a run's configuration; None for one that is missing, empty or broken."""
    try:
        return read_config(path) or None
    except (FileNotFoundError, ConfigError):
        return None


def _chosen(typed: Typed) -> set[str]:
    """Return the groups whose option is typed, or chosen by an experiment that is."""
    loader = GlobalHydra.instance().config_loader()
    single = [each for each in _parsed(typed.overrides) if not each.is_sweep_override()]
    found = loader.compute_defaults_list(
        config_name=typed.config_name or CONFIG_NAME,
        overrides=[str(each.input_line) for each in single],
        run_mode=RunMode.RUN,
    )
    several = (each.key_or_group for each in _parsed(typed.overrides) if each.is_sweep_override())
    return {*found.overrides.override_choices, *several}


def _leave_out_unread(values: dict[str, Any]) -> None:
    """Remove the FP8 keys of a recipe that the saved run does not use: defaults of its version may
    differ, and other values than today's defaults are refused without the recipe.
    """
    precision = values.get("precision")
    fp8 = precision.get("fp8") if isinstance(precision, dict) else None
    if isinstance(fp8, dict) and fp8.get("recipe") != Fp8Recipe.delayed.value:
        for name in OF_DELAYED:
            fp8.pop(name, None)


def _set_replicas(parallel: dict[str, Any], world_size: int | None, anew: bool) -> None:
    """Set `dp` of a saved section `parallel`: as before, or from a launcher's `world_size`, or open
    if the number of processes is typed (`anew`).
    """
    ranks = 1
    for axis in ("tp", "cp", "pp"):
        ranks *= _number(parallel.get(axis)) or 1
    processes = world_size or _number(parallel.get("world_size"))
    parallel["world_size"] = None
    if anew:
        parallel["dp"] = None
    elif processes and (world_size or parallel.get("dp") is None):
        parallel["dp"] = None if processes % ranks else processes // ranks


def _number(value: Any) -> int | None:
    """Return a saved number of ranks; None for anything else, which composing refuses."""
    return value if type(value) is int and value > 0 else None


def _kept(values: dict[str, Any], prefix: str, known: frozenset[str]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in known and key not in OF_ONE_START:
            inner = isinstance(value, dict)
            yield name, dict(_kept(value, f"{key}.", known)) if inner else _as_text(value)


def _as_text(value: Any) -> Any:
    """Return a value whose texts are no references: what they stood for was saved."""
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    return literal(value) if isinstance(value, str) else value


def _unknown(values: dict[str, Any], prefix: str, known: frozenset[str]) -> Iterator[str]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key not in known:
            yield key
        elif isinstance(value, dict):
            yield from _unknown(value, f"{key}.", known)
