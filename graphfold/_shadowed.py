"""The package `app` of this distribution, where a user's own `app` is found first."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

OURS = Path(__file__).parents[1] / "app" / "__init__.py"


def import_app() -> None:
    """Import our `app`, also for a program of the user's that is called app.py itself.

    Raises ImportError if `app` is, or may become, another module of that process.
    """
    loaded = sys.modules.get("app")
    spec = find_spec("app") if loaded is None else loaded.__spec__
    where = None if spec is None else _place(spec)
    if where == OURS.resolve():
        return
    program = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "").resolve()
    if loaded is not None or where not in (None, program):
        shown = where or getattr(loaded, "__file__", None) or "another module"
        raise ImportError(f"graphfold needs its own package app, which {shown} hides: rename that")
    ours = spec_from_file_location("app", OURS, submodule_search_locations=[str(OURS.parent)])
    assert ours is not None and ours.loader is not None, f"{OURS} is a Python file"
    sys.modules["app"] = module = module_from_spec(ours)
    ours.loader.exec_module(module)


def _place(spec: ModuleSpec) -> Path | None:
    """Return the file of a module, or the first folder of a namespace package."""
    folders = list(spec.submodule_search_locations or ())
    found = spec.origin if spec.has_location else next(iter(folders), None)
    return None if found is None else Path(found).resolve()
