"""Names of earlier versions in typed overrides and in YAML files: read by their present names, each
told once (app.config.renamed is the record).
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from app.cli.processes.environment import environment
from app.cli.processes.launcher import STARTED_AS
from app.config.renamed import (
    CHANGED,
    RenamedValue,
    both_names,
    new_key,
    removed,
    with_new_names,
)
from app.engine.files.run_folder import HEADER
from app.errors import ConfigError, say, typed

# prefix, key or group with its package, and the value where there is one
OVERRIDE = re.compile(r"(\+\+|\+|~|)([^=+~]+)(?:=(.*))?", re.DOTALL)


def tell(lines: Iterable[str], where: str = "") -> None:
    """Print lines on old names to stderr, each once in a process, and by one rank alone."""
    env = environment()
    if env.get("RANK", env.get("SLURM_PROCID", "0")) == "0" and STARTED_AS not in env:
        for line in lines:
            _say(f"old name: {line}{where}")


@cache
def _say(line: str) -> None:
    say(line, sys.stderr)


def with_present_names(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return overrides by their present names, which it tells; those that do nothing any more are
    left out. Raises ConfigError for removed keys, and for two names of one key.
    """
    found = list[str]()
    given = {match[2] for word in overrides if (match := OVERRIDE.fullmatch(word))}
    for word in overrides:
        match = OVERRIDE.fullmatch(word)
        found += [word] if match is None else _present(word, match, given)
    return tuple(found)


def _present(word: str, match: re.Match[str], given: set[str]) -> Iterator[str]:
    """Yield an override by its present name; nothing where it does nothing any more."""
    prefix, old, value = match[1], match[2], match[3]
    key = new_key(old)
    if (gone := removed(key)) is not None:
        if value is not None and not gone.idles(value.strip("'\"")):
            raise gone.refused(value, old)
        tell([f"{old} was removed, and {word} does nothing: {gone.now}"])
        return
    if key != old:
        if key in given:
            raise both_names(old, value or "", key)
        tell([f"{old} is now {key}"])
    if value is None:
        yield f"{prefix}{key}"
        return
    yield f"{prefix}{key}={_present_value(key, value)}"


def _present_value(key: str, value: str) -> str:
    """Return the text of a value of a key, or of a sweep over values, by present names."""
    for change in CHANGED:
        if isinstance(change, RenamedValue) and change.key == key:
            old = rf"(?<![\w.-]){re.escape(change.old)}(?![\w.-])"
            new = typed(change.new)
            value, count = re.subn(old, new.replace("\\", r"\\"), value, flags=re.IGNORECASE)
            tell([f"{key}={change.old} is now {key}={new}"] * bool(count))
    return value


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's folders of YAML files, read by present names.

    It has the name of Hydra's class, in whose place Hydra takes no class of another name.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        """See Hydra's class. Raises ConfigError for removed keys, and two names of one key."""
        file = _file(self.path, config_path)
        if not file.is_file():
            return super().load_config(config_path)  # raises
        stat = file.stat()
        state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        found, told = pickle.loads(_loaded(self.provider, self.path, config_path, state=state))
        tell(told, f" (in {file})")
        assert isinstance(found, ConfigResult)
        return found


def _file(folder: str, config_path: str) -> Path:
    return Path(folder) / f"{config_path.removesuffix('.yaml')}.yaml"


@cache
def _loaded(provider: str, folder: str, config_path: str, *, state: tuple[int, ...]) -> bytes:
    """Return a file in this state by present names, and the lines on its old ones, pickled.

    A start composes several times, and parsing takes 30 times as long as unpickling.
    """
    source = file_config_source.FileConfigSource(provider, f"file://{folder}")
    found, told = source.load_config(config_path), list[str]()
    file = _file(folder, config_path)
    values = OmegaConf.to_container(found.config, resolve=False)
    if isinstance(found.config, DictConfig) and isinstance(values, dict):
        try:
            present, told = with_new_names(
                values, _package(config_path, found.header), saved=_is_saved(file)
            )
        except ConfigError as error:
            rule = f"{error.rule}, in {file}"
            raise ConfigError(error.key, error.value, rule, advice=error.advice) from None
        if present != values:
            found.config = OmegaConf.create(present)
    return pickle.dumps((found, told))


def _package(config_path: str, header: dict[str, str | None]) -> str:
    """Return the dotted section that a YAML file has the keys of, empty for a whole
    configuration.
    """
    package = header.get("package")
    if package is None or package == "_group_":
        return config_path.rpartition("/")[0].replace("/", ".")
    return "" if package == "_global_" else package


def _is_saved(file: Path) -> bool:
    """Return whether a run has written a file."""
    with file.open(encoding="utf-8", errors="replace") as opened:
        return opened.readline().startswith(HEADER)


def read_files_by_present_names() -> None:
    """From here on let Hydra read YAML files by present names."""
    SourcesRegistry.instance().types["file"] = FileConfigSource
