"""Programs end with the daemon that has started them; here another program of its name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.cli.processes.slurm_step import DAEMON, POLL_S
from tests.training import ROOT, wait_for

PROGRAM = """
import pathlib, sys, time
from app.cli.processes.slurm_step import end_with_daemon
end_with_daemon()
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.mark.parametrize(("name", "shells"), [(DAEMON, 0), (DAEMON, 1), ("another", 0)])
def test_a_program_ends_with_the_daemon_above_it(tmp_path: Path, name: str, shells: int):
    """Also below a shell; programs that were started otherwise continue."""
    (tmp_path / name).symlink_to(shutil.which("sh"))
    line = f'{sys.executable} -c "$PROGRAM" began & echo $! >child; wait'
    for _ in range(shells):
        line = f"sh -c '{line}'; true"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PROGRAM": PROGRAM}
    daemon = subprocess.Popen([tmp_path / name, "-c", line], cwd=tmp_path, env=env)
    wait_for((tmp_path / "began").exists)
    program = Path("/proc", (tmp_path / "child").read_text().strip())
    try:
        daemon.kill()
        daemon.wait()
        if name == DAEMON:
            wait_for(lambda: not program.exists(), 10)
        else:
            time.sleep(3 * POLL_S)
            assert program.exists()
    finally:
        if program.exists():
            os.kill(int(program.name), signal.SIGKILL)
