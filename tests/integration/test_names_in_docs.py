"""Functions, modules and files that the pages name exist."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

from tests.training import ROOT

pytestmark = pytest.mark.docs

ROOT_PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS")]
PAGES = [*ROOT_PAGES, *sorted((ROOT / "docs").glob("*.md"))]
NAME = re.compile(r"(?<![\w./-])app(?:\.\w+)+")
PATH = re.compile(r"(?<![\w./-])(?:app|tests|bench|scripts|conf|docs)/[\w./-]*\w")


def exists(name: str) -> bool:
    """Whether `name` is a module, or reached from one by attributes."""
    known, *parts = name.split(".")
    while parts and list((ROOT / known.replace(".", "/")).glob(f"{parts[0]}*")):
        known = f"{known}.{parts.pop(0)}"
    try:
        reduce(getattr, parts, import_module(known))
    except (AttributeError, ModuleNotFoundError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_exists(page: Path):
    text = page.read_text()
    assert [name for name in sorted(set(NAME.findall(text))) if not exists(name)] == []
    missing = [name for name in sorted(set(PATH.findall(text))) if not (ROOT / name).exists()]
    assert [name for name in missing if not list(ROOT.glob(f"{name}*"))] == []


def test_a_name_that_does_not_exist_is_found():
    assert exists("app.planner.plan.Plan.actions") and exists("app.cli.plan")
    assert not exists("app.planner.plan.Plan.nothing") and not exists("app.nowhere.plan")
