"""Runs in processes of their own: what they say, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

GRACE = 60  # seconds for torchrun to end its ranks
ENDING = 20  # seconds for a run to end, once it has said its figures
POLL = 0.1  # seconds between looks


def start_and_wait(
    command: Sequence[str], env: Mapping[str, str], timeout: float
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; all processes are gone afterwards. One that has said its
    figures and goes on for `ENDING` seconds is ended, with exit code 0: ranks that captured graphs
    may wait for each other without end when they leave their groups.
    """
    inherited = {
        name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"
    }
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command,
            env=inherited | dict(env),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        last, said = time.monotonic() + timeout, False
        try:
            while (code := process.poll()) is None and time.monotonic() < last:
                time.sleep(POLL)
                if not said and figures(all_of(stdout)):
                    last, said = min(last, time.monotonic() + ENDING), True
        finally:
            _end(process)
        if code is None and not figures(all_of(stdout)):
            return -1, all_of(stdout), f"not done after {timeout:.0f} s"
        return code or 0, all_of(stdout), all_of(stderr)


def all_of(file: BinaryIO) -> str:
    """What has been written so far; who writes goes on where they were."""
    number = file.fileno()
    return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")


def figures(stdout: str) -> dict[str, Any]:
    """Of the last whole line of JSON that has a step's time; empty without one."""
    for line in reversed(stdout.split("\n")[:-1]):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                said: dict[str, Any] = json.loads(line)
                if "step_ms" in said:
                    return said
    return {}


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun that is told to stop ends its ranks; others that a run has left are killed."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def why(stderr: str, code: int) -> str:
    """The line of a failed run's stderr that tells most: its last error, else its last line;
    without torchrun's own report.
    """
    before = re.split(r"^.*torch/distributed/elastic/.*$", stderr, maxsplit=1, flags=re.MULTILINE)[
        0
    ]
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line).strip() for line in before.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return [f"exit code {code}", *filter(None, lines), *errors][-1]
