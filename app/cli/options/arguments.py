"""Arguments of `train.py`: overrides, and Hydra's flags for folders of options."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from app.cli.options.hydra_words import check_config_flag
from app.cli.options.old_names import with_present_names
from app.cli.processes.home import BASE, CONF
from app.errors import ConfigError, nearest
from app.programs import command_name
from app.version import Version

CONFIG_NAME = "train"
PLACES = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")  # Hydra's flags
SWEEPS = frozenset({"-m", "--multirun"})
STORED = ("storage", "study_name")  # keys of a search that others continue
OUR_SEARCH = "hydra.sweeper._target_=hydra_plugins.graphfold.SearchSweeper"
MOST_STARTS = 10_000  # of one command of another sweeper
# What says how jobs are started is for the program that starts them.
OF_SWEEPS = (
    "hydra.mode=",
    "hydra.sweep.",
    "hydra.sweeper",
    "hydra/sweeper",
    "hydra.launcher",
    "hydra/launcher",
)


@dataclass(frozen=True, slots=True)
class Typed:
    """Overrides, and the folders and file of the configuration that they change."""

    overrides: tuple[str, ...] = ()
    config_dir: str | None = None  # more folders of options, beside conf/
    config_path: str | None = None  # in the place of conf/
    config_name: str | None = None  # in the place of conf/train.yaml

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Typed:
        """Read the arguments as `hydra.main` does, old names of keys as the present ones. Raises
        ConfigError for unknown flags and removed keys.
        """
        check_config_flag(arguments)
        parser = get_args_parser()
        for action in parser._actions:
            asked = any(word.startswith("--v") for word in arguments)  # git takes some milliseconds
            if asked and "--version" in action.option_strings:
                action.version = f"graphfold {Version.of().short}"  # type: ignore[attr-defined]
        args, unknown = _parsed(parser, arguments)
        if unknown:
            known = [name for action in parser._actions for name in action.option_strings]
            rule = f"there is no such option; {command_name('train')} --help"
            raise ConfigError("option", unknown[0], rule, guess=nearest(unknown[0], known))
        overrides = with_present_names(args.overrides)
        return cls(overrides, args.config_dir, args.config_path, args.config_name)

    @classmethod
    def of_config(cls, hydra: DictConfig) -> Typed:
        """Return the arguments that a composed configuration records in its section `hydra`.

        Overrides are those of Hydra that jobs of a sweep need as well.
        """
        found = {source.provider: str(source.path) for source in hydra.runtime.config_sources}
        main = found.get("main", "")
        name = str(hydra.job.config_name)
        return cls(
            tuple(each for each in hydra.overrides.hydra if not each.startswith(OF_SWEEPS)),
            found.get("command-line"),
            main if main and Path(main) != CONF else None,
            name if name != CONFIG_NAME else None,
        )

    @property
    def folder(self) -> Path:
        """Folder of the first YAML file: relative to train.py, or to the current folder if
        installed.
        """
        return CONF if self.config_path is None else BASE / self.config_path

    @property
    def words(self) -> list[str]:
        """Flags and overrides as typed."""
        return [*self._flags(), *self.overrides]

    def _flags(self) -> Iterator[str]:
        for field in ("config_dir", "config_path", "config_name"):
            if value := getattr(self, field):
                yield from (f"--{field.replace('_', '-')}", value)

    def with_overrides(self, overrides: Sequence[str]) -> Typed:
        """Return a copy with these overrides in place of those of the same keys."""
        new = {key_of(override) for override in overrides}
        kept = (override for override in self.overrides if key_of(override) not in new)
        return dataclasses.replace(self, overrides=(*kept, *overrides))

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        """Let `hydra.compose` search the folders of these flags. Raises ConfigError for a missing
        one.
        """
        for flag, folder in (
            ("--config-dir", self.config_dir),
            ("--config-path", self.config_path and self.folder),
        ):
            if folder is not None and not Path(folder).is_dir():
                raise ConfigError(flag, folder, "no such folder")
        path = create_config_search_path(str(self.folder.absolute()))
        if self.config_dir is not None:
            own = f"file://{Path(self.config_dir).absolute()}"
            path.prepend("command-line", own, anchor=SearchPathQuery(provider="schema"))
        version.setbase("1.3")
        state = GlobalHydra.instance()
        running = state.hydra  # that of hydra.main
        state.hydra = None  # where it runs
        try:
            Hydra.create_main_hydra2(task_name=CONFIG_NAME, config_search_path=path)
            yield
        finally:
            state.hydra = running


def _parsed(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    parser.exit_on_error = False
    try:
        # Between flags, so that what stands behind an unknown one is not taken for its value.
        return parser.parse_known_intermixed_args(list(arguments))
    except ArgumentError as error:
        name = error.argument_name or ""
        raise ConfigError("option", name.partition("/")[0], error.message) from error


def flags_first(arguments: Sequence[str], typed: Typed, beside: Sequence[str] = ()) -> list[str]:
    """Return the arguments in the order that hydra.main needs: flags, then the overrides `beside`,
    then those typed, which so take precedence. Paths become absolute.
    """
    flags = list(arguments)
    for override in reversed(_parsed(get_args_parser(), arguments)[0].overrides):
        del flags[len(flags) - 1 - flags[::-1].index(override)]
    found = ["--config-path", str(typed.folder.absolute())] if typed.config_path is not None else []
    return [*flags, *found, *beside, *typed.overrides]


def sweeper_of(arguments: Sequence[str]) -> str:
    """Return the sweeper that is typed; else ours."""
    sweepers = [each.partition("=")[2] for each in arguments if key_of(each) == "hydra/sweeper"]
    return sweepers[-1] if sweepers else "grid"


def is_stored(arguments: Sequence[str]) -> bool:
    """Return whether a search is stored under a name, so that a later one continues it."""
    given = dict(each.split("=", 1) for each in arguments if "=" in each)
    return all(given.get(f"hydra.sweeper.{key}", "null") != "null" for key in STORED)


def with_sweep_folder(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with a sweep folder if another sweeper than ours runs: it would take the
    name in conf/ literally.

    Like ours, it depends on what is typed, but not on its order. These sweepers do not resume: each
    start has a folder of its own, but for a search that is stored.
    """
    sweeper = sweeper_of(arguments)
    given = any(each.startswith("hydra.sweep.dir=") for each in arguments)
    if not SWEEPS & set(arguments) or given or sweeper == "grid":
        return list(arguments)
    digest = hashlib.sha256("\n".join(sorted(arguments)).encode()).hexdigest()[:8]
    folder = Path(f"sweeps/{sweeper}-{digest}")
    names = (folder, *(Path(f"{folder}-{number}") for number in range(2, MOST_STARTS)))
    free = (name for name in names if is_stored(arguments) or not name.exists())
    return [*arguments, f"hydra.sweep.dir={next(free, folder)}"]


def with_our_search(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with our checks around the sweeper of Optuna, if that one is chosen."""
    searches = SWEEPS & set(arguments) and sweeper_of(arguments) == "optuna"
    return [*arguments, OUR_SEARCH] if searches else list(arguments)


def foreign_flags(arguments: Sequence[str], known: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield flags that are not `known`: index, the equivalent override, and the words as typed. A
    flag without `=` takes the next word as its value, unless that is a flag or an override.
    """
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if not re.match("--?[A-Za-z]", word) or name in known:
            continue
        behind = arguments[place + 1] if place + 1 < len(arguments) else "-"
        takes = not equals and not behind.startswith("-") and "=" not in behind
        override = f"{name.lstrip('-').replace('-', '_')}={behind if takes else value}"
        yield place, override, f"{word} {behind}" if takes else word


def without_places(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into the others and the flags of PLACES with their values."""
    words = list(arguments)
    places = list[str]()
    for place, word in enumerate(arguments):
        if word.partition("=")[0] in PLACES:
            places += [word] if "=" in word else arguments[place : place + 2]
    for word in places:
        words.remove(word)
    if places and places[-1] in PLACES:
        raise ConfigError("option", places[-1], "must be followed by a folder or a name")
    return words, places


def flags_to_overrides(arguments: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """Return the arguments with overrides in place of unknown flags."""
    words: list[str | None] = list(arguments)
    for place, override, typed in foreign_flags(arguments, known or hydra_flags()):
        words[place] = override
        if typed != arguments[place]:
            words[place + 1] = None
    return [word for word in words if word is not None]


def hydra_flags() -> tuple[str, ...]:
    """Return the flags of `hydra.main`."""
    return tuple(name for action in get_args_parser()._actions for name in action.option_strings)


def is_share(override: str) -> bool:
    """Return whether an override says how the jobs of a sweep share this host: it is of the sweep,
    and no job has it.
    """
    return key_of(override).startswith("sweep.")


def refuse_share(key: str, value: object, launcher: str) -> None:
    """Raise ConfigError for a key of `sweep` unless this launcher, ours, runs the jobs."""
    if launcher != "torchrun":
        rule = f"applies to hydra/launcher=torchrun, not to {launcher}"
        raise ConfigError(key, value, rule, advice="leave it out")


def key_of(override: str) -> str:
    """Return the key or group of an override: "model" for +model=small."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]
