"""Which files the options of `data` stand for, and the nearest where there are none."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from app.choices import Source
from app.config import DataConfig
from app.errors import ConfigError, nearest

STDLIB_SUFFIXES = (".py", ".rst", ".txt")


LOOKED_AT = 1000  # files of a folder, to know their kind


BIN, INDEX = ".bin", ".idx"  # of Megatron


NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


def source_option(config: DataConfig) -> tuple[str, str]:
    """Key and value of the option that says where the documents are."""
    if config.of_hub:
        where = f"config_name={config.config_name}, split={config.split}"
        return "data.name", f"{config.name} ({where})"
    if config.source is Source.stdlib:
        return "data.source", config.source.value
    return "data.path", " ".join(config.path)


def stdlib_files() -> list[str]:
    """Paths of the Python and text files of the running interpreter's standard library, sorted."""
    found = []
    for folder, inner, names in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = [name for name in inner if name not in NOT_STDLIB]
        found += [os.path.join(folder, name) for name in names if name.endswith(STDLIB_SUFFIXES)]
    if not found:
        rule = "this interpreter's standard library is not a folder of files"
        raise ConfigError("data.source", Source.stdlib, rule, nearest="text")
    return sorted(found)


def index_of(path: str) -> str:
    """The .idx beside a .bin of Megatron."""
    return path.removesuffix(BIN) + INDEX


def local_files(config: DataConfig) -> list[str]:
    """Absolute paths of local files; of Megatron's the .bin alone, however data.path names the
    pair: by either file, or as Megatron does, without an ending.
    """
    if config.source is not Source.megatron:
        return matching_files(config.path)
    names = [path.removesuffix(BIN).removesuffix(INDEX) for path in config.path]
    return matching_files([name + BIN for name in names])


def matching_files(patterns: Sequence[str]) -> list[str]:
    """Absolute paths of the files that match the patterns (`**` matches any folders), sorted, once.

    The order of the patterns does not count: caches and checkpoints go by that of the paths.

    Raises ConfigError for a pattern that matches nothing.
    """
    found = set()
    for pattern in patterns:
        listed = glob.glob(pattern, recursive=True)
        files = [os.path.abspath(path) for path in listed if os.path.isfile(path)]
        if not files:
            raise _no_file(pattern)
        found.update(files)
    return sorted(found)


def _no_file(pattern: str) -> ConfigError:
    """What is wrong with a pattern that matches nothing: its folder, or the name in it."""
    if folders := [Path(path) for path in sorted(glob.glob(pattern)) if os.path.isdir(path)]:
        return _only_folders(pattern, folders)
    folder = Path(pattern).parent
    rule = "matches no file"
    if not folder.is_dir():
        named = not glob.has_magic(str(folder))
        rule += f": there is no folder {folder}" if named else ""
        return ConfigError("data.path", pattern, rule)
    files = [path for path in folder.iterdir() if path.is_file()]
    return ConfigError("data.path", pattern, rule, guess=most_like(Path(pattern).name, files))


def _only_folders(pattern: str, folders: Sequence[Path]) -> ConfigError:
    """What to type for a path that stands for folders: a pattern of the files in them."""
    rule = "is a folder" if Path(pattern).is_dir() else "matches folders only"
    files = next((found for each in folders if (found := _files_below(each))), None)
    if files is None:
        return ConfigError("data.path", pattern, f"{rule}, without files in it")
    ending = Counter(path.suffix for path in files).most_common(1)[0][0]
    advice = f"give its files: data.path='{pattern.rstrip(os.sep)}/**/*{ending}'"
    return ConfigError("data.path", pattern, f"{rule}, not a file", advice=advice)


def _files_below(folder: Path) -> list[Path]:
    """Some of the files of a folder and of those in it, but for hidden ones."""
    found = (path for path in folder.rglob("[!.]*") if path.is_file())
    return list(islice(found, LOOKED_AT))


def no_column(field: str, names: Sequence[str]) -> ConfigError:
    """What to say where no text is called `field`."""
    rule = f"no such column; there are {', '.join(names) or 'none'}"
    return ConfigError("data.text_field", field, rule, guess=nearest(field, names))


def most_like(name: str, paths: list[Path]) -> str | None:
    """The path whose name is most like `name`, None when nothing is close."""
    close = nearest(name, sorted(path.name for path in paths))
    return str(paths[0].parent / close) if close else None
