"""Import of Transformer Engine for runs that ask for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module, metadata
from types import ModuleType

from app.errors import ConfigError

LIBRARY = "transformer_engine"
OLDEST = (2, 20)  # first release whose functions take the arguments that our modules pass
# In an isolated build pip would compile the bindings against a torch of its own choice.
INSTALL = "pip install 'graphfold[gpu]' --no-build-isolation"


def import_library(refused: Callable[[str], ConfigError]) -> ModuleType:
    """Return Transformer Engine for torch. Raises what `refused` makes of the reason if it is
    missing, too old or cannot be loaded.
    """
    try:
        version = library_version()
    except metadata.PackageNotFoundError:
        raise refused("Transformer Engine is not installed") from None
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])  # also of 2.20rc1
    if release < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise refused(f"Transformer Engine {version} is older than {wanted}")
    return load(refused)


def load(refused: Callable[[str], ConfigError]) -> ModuleType:
    """Return Transformer Engine for torch, of any version.

    Raises what `refused` makes of the reason if it cannot be loaded: next to an incompatible
    package the import may raise any exception.
    """
    try:
        return import_module(f"{LIBRARY}.pytorch")
    except Exception as error:
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise refused(f"Transformer Engine cannot be loaded: {what}") from error


def library_version() -> str:
    """Return the installed version. Raises PackageNotFoundError."""
    return metadata.version(LIBRARY)
