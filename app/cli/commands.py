"""Entry points of the installed commands: graphfold-<name> calls <name>, which runs
app/cli/<name>.py.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

from app.cli.processes.ctrl_c import stop_quietly


def train() -> None:
    """Train (`python train.py`)."""
    parent = os.getppid()  # before the slow imports: a launcher may die during them
    _loaded("train", "train.py").command(parent)


def plan() -> None:
    """Plan a run (`python -m app.cli.plan`)."""
    _loaded("plan", "plan").command()


def report() -> None:
    """Make a table of runs (`python -m app.cli.report`)."""
    _loaded("report", "report").command()


def convert() -> None:
    """Convert models from and to Hugging Face format (`python -m app.cli.convert`)."""
    _loaded("convert", "convert").command()


def generate() -> None:
    """Generate text with a trained model (`python -m app.cli.generate`)."""
    parent = os.getppid()  # as above
    _loaded("generate", "generate").command(parent)


def evaluate() -> None:
    """Score texts with a trained model (`python -m app.cli.evaluate`)."""
    parent = os.getppid()  # as above
    _loaded("evaluate", "evaluate").command(parent)


def calibrate() -> None:
    """Measure the speeds of GPUs (`python -m app.cli.calibrate`)."""
    parent = os.getppid()  # as above
    _loaded("calibrate", "calibrate").command(parent)


def _loaded(module: str, called: str) -> ModuleType:
    stop_quietly(called)  # before the imports, which take seconds
    return import_module(f"app.cli.{module}")
