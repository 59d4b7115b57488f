"""Where this program lies: a checkout with conf/ beside `app`, or a package with conf/ inside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# as found: a checkout may reach `app` by a link, and has a conf/ of its own
PACKAGE = Path(__file__).parents[2]
INSTALLED = (PACKAGE / "conf").is_dir()
CONF = (PACKAGE if INSTALLED else PACKAGE.parent) / "conf"
# where paths of options begin that are relative to the program
BASE = Path() if INSTALLED else PACKAGE.parent


def user_conf() -> Path:
    """The user's own options, which are found beside conf/: an installed one may be read-only."""
    return Path.home() / ".config" / "graphfold"


def child_paths(env: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a fresh interpreter imports this `app`.

    Neither what lies beside its script nor the current folder comes first, whose files may have the
    names of modules.
    """
    ours = [] if INSTALLED else [str(PACKAGE.parent)]
    given = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    paths = os.pathsep.join(dict.fromkeys([*ours, *given]))
    return {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": paths} if paths else {})}
