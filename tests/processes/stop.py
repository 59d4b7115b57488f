"""Shared by test_stop.py and other tests."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from app.cli import torchrun
from tests.forks import Process
from tests.training import (
    wait_for,
)


def exit_code(work: Callable[[], int | None]) -> int:
    """Exit code of a forked process that does `work`; negative: the signal that ended it."""

    def child() -> None:
        os._exit(work() or 0)

    process = Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "hangs"
    return process.exitcode


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
rank, folder = os.environ["RANK"], Path(sys.argv[1])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
# rank or rank/attempt: exit code, negative for a signal, or a word
ends = dict(word.split(":") for word in sys.argv[2:])
end = ends.get(f"{rank}/{attempt}", ends.get(rank, "0"))
def wait_until_sent(number, frame):
    (folder / "ending").touch()
    while not (folder / "sent").exists():
        time.sleep(0.01)
    os._exit(75)
if end == "sleep":
    codes = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGUSR2: 75, signal.SIGINT: 130}
    for number, code in codes.items():
        signal.signal(number, lambda number, frame, code=code: (time.sleep(0.5), os._exit(code)))
if end == "slow":
    signal.signal(signal.SIGTERM, wait_until_sent)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if end == "deaf":
    signal.signal(signal.SIGINT, lambda number, frame: None)
# what stops it may come from now on
(folder / f"began-{rank}-{attempt}").touch()
while len(list(folder.glob(f"began-*-{attempt}"))) < 2:
    time.sleep(0.01)
if end in ("sleep", "slow", "deaf", "idle"):
    time.sleep(60)
if int(end) < 0:
    os.kill(os.getpid(), -int(end))
sys.exit(int(end))
"""


def launched(
    folder: Path, *arguments: str, ends: Sequence[str] = (), send: Sequence[int] = ()
) -> tuple[int, str, list[str]]:
    """Exit code and stderr of a torchrun of ours, and what began; `send` are signals that reach
    it when its ranks are up, or when one that ends slowly has been told to.
    """
    script, said = folder / "script.py", folder / "said"
    script.write_text(SCRIPT)

    def work() -> int:
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = open(2, "w")  # noqa: SIM115
        return torchrun.main(["--nproc-per-node=2", *arguments, str(script), str(folder), *ends])

    process = Process(target=lambda: os._exit(work()))
    process.start()
    up = "ending" if any(end.endswith(":slow") for end in ends) else "began-*"
    if send:
        wait_for(lambda: len(list(folder.glob(up))) == (1 if up == "ending" else 2))
    for number in send:
        time.sleep(0.2)
        os.kill(process.pid, number)
    (folder / "sent").touch()
    process.join(60)
    return process.exitcode, said.read_text(), sorted(path.name for path in folder.glob("began-*"))
