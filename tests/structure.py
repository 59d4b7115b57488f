"""Shared by test_structure.py and other tests."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


SOURCES = sorted((ROOT / "app").rglob("*.py"))


INTERFACE = sorted((ROOT / "graphfold").rglob("*.py"))  # the Python interface, beside app/


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in SOURCES}


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the modules that the import statements among these nodes name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            parts = {f"{module}.{alias.name}" for alias in node.names} & MODULES
            yield from parts or {module}
