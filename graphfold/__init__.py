"""Graphfold from Python: plan, train, generate, evaluate and export.

Overrides are those of the commands, as a list: `graphfold.train(["model=dense_tiny", "log=none"])`.
Importing this package loads no torch; planning does not either.
"""

from __future__ import annotations

from graphfold._shadowed import import_app

import_app()  # before the imports from it

from app import __version__
from app.errors import ConfigError
from graphfold.models import Model, load
from graphfold.planning import Plan, plan
from graphfold.training import Result, RunError, train

__all__ = [
    "ConfigError",
    "Model",
    "Plan",
    "Result",
    "RunError",
    "__version__",
    "load",
    "plan",
    "train",
]
