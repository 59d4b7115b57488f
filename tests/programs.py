"""`python train.py …` in a forked process: as a fresh interpreter would run it, but with torch and its like already loaded."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.figure  # noqa: F401 - loaded once instead of in every program

import app.data.corpus
import app.engine.trainer  # noqa: F401 - likewise
from tests.distributed import begin_fork

TIMEOUT_S = 120


def run_forked(
    folder: Path, line: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run(line, cwd=folder, …)` returns, for a line of interpreter, script and its arguments.

    Processes that the program itself starts are fresh ones.
    """
    files = [os.memfd_create(name) for name in ("stdout", "stderr")]
    program = multiprocessing.get_context("fork").Process(target=_program, args=(folder, line, env, files))
    program.start()
    program.join(TIMEOUT_S)
    if program.is_alive():
        program.kill()
        raise subprocess.TimeoutExpired(list(line), TIMEOUT_S)
    out, err = (_written(file) for file in files)
    return subprocess.CompletedProcess(list(line), program.exitcode, out, err)


def _written(file: int) -> str:
    with os.fdopen(file, "rb") as opened:
        opened.seek(0)
        return opened.read().decode()


def _program(folder: Path, line: Sequence[str], env: Mapping[str, str] | None, files: Sequence[int]) -> None:
    begin_fork()
    for target, file in zip((1, 2), files, strict=True):
        os.dup2(file, target)
    sys.stdout, sys.stderr = (open(target, "w", 1, closefd=False) for target in (1, 2))  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    os.chdir(folder)
    warnings.resetwarnings()
    sys.argv = list(line[1:])
    sys.path.insert(0, str(Path(line[1]).parent))
    code: object = 0
    try:
        runpy.run_path(line[1], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)
