"""Location of this program: a checkout with conf/ beside `app`, or a package with conf/ inside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from app.programs import FILES, INSTALLED, PACKAGE

CONF = FILES / "conf"
# relative paths of options (--config-path) start here
BASE = Path() if INSTALLED else PACKAGE.parent


def user_conf() -> Path:
    """Return the folder of the user's own options, searched after conf/, which may be read-only."""
    return Path.home() / ".config" / "graphfold"


def child_paths(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a fresh interpreter imports this `app`.

    PYTHONSAFEPATH keeps the folder of the script and the current folder out of sys.path: a user's
    file there may have the name of a module.
    """
    ours = [] if INSTALLED else [str(PACKAGE.parent)]
    given = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    paths = os.pathsep.join(dict.fromkeys([*ours, *given]))
    return {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": paths} if paths else {})}
