"""The installed commands: graphfold-<name> is <name> here, and app/cli/<name>.py its program."""

from __future__ import annotations

from importlib import import_module

from app.cli.ctrl_c import stop_quietly


def train() -> None:
    """Train (`python train.py`)."""
    _run("train", "train.py")


def plan() -> None:
    """Plan a run (`python -m app.cli.plan`)."""
    _run("plan", "plan")


def report() -> None:
    """Make a table of runs (`python -m app.cli.report`)."""
    _run("report", "report")


def _run(module: str, called: str) -> None:
    stop_quietly(called)  # the imports take seconds
    import_module(f"app.cli.{module}").command()
