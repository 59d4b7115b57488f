"""Entry points of the installed commands: graphfold-<name> calls <name>, which runs
app/cli/<name>.py.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

from app.cli.processes.ctrl_c import stop_quietly
from app.cli.processes.first_line import begin_layouts


def train() -> None:
    """Train (`python train.py`)."""
    parent = os.getppid()  # before the slow imports: a launcher may die during them
    _loaded("train").command(parent)


def plan() -> None:
    """Plan a run (`python -m app.cli.plan`)."""
    _run("plan")


def report() -> None:
    """Make a table of runs (`python -m app.cli.report`)."""
    _run("report")


def data() -> None:
    """Show what training reads (`python -m app.cli.data`)."""
    _run("data")


def tokenizer() -> None:
    """Train a tokenizer (`python -m app.cli.tokenizer`)."""
    _run("tokenizer")


def convert() -> None:
    """Convert models from and to Hugging Face format (`python -m app.cli.convert`)."""
    _run("convert")


def generate() -> None:
    """Generate text with a trained model (`python -m app.cli.generate`)."""
    _run_rank("generate")


def chat() -> None:
    """Talk with a trained model (`python -m app.cli.chat`)."""
    _run_rank("chat")


def evaluate() -> None:
    """Score texts with a trained model (`python -m app.cli.evaluate`)."""
    _run_rank("evaluate")


def calibrate() -> None:
    """Measure the speeds of GPUs (`python -m app.cli.calibrate`)."""
    _run_rank("calibrate")


def doctor() -> None:
    """Check hosts before a run (`python -m app.cli.doctor`)."""
    _run_rank("doctor")


def tune() -> None:
    """Find the fastest layout (`python -m app.cli.tune`)."""
    _run("tune")


def _run(program: str) -> None:
    main = _loaded(program).main
    from app.cli.processes.output import exit_by

    exit_by(main)


def _run_rank(program: str) -> None:
    parent = os.getppid()  # as in `train`
    sys.exit(_loaded(program).main(sys.argv[1:], parent))


def _loaded(program: str) -> ModuleType:
    stop_quietly(program)  # before the imports, which take seconds
    if program == "plan":
        begin_layouts(sys.argv[1:])
    return import_module(f"app.cli.{program}")
