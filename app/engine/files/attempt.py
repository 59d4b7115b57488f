"""Continue after a restart: restarted processes of one launch find their run folder."""

from __future__ import annotations

import os
import sys
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch.distributed as dist

from app.config import Run
from app.engine.files.life import ENDED_WITH, Life
from app.engine.files.run_folder import CONFIG
from app.engine.files.signals import INTERRUPTED, STOPPED
from app.engine.ranks.meeting import TIMEOUT, join_store, meet
from app.errors import OwnError, writing
from app.own_files import read_regular, write_whole
from app.programs import command_name, speaker

PREFIX = "graphfold"  # of our keys in a store shared with torchrun
FOLDER = "run_dir"  # key of the run folder in the store
WORD = ".attempt"  # file in the run folder with the same secret word as the store
POLL_S = 0.01  # seconds between checks for ranks that arrived


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a launch's ranks, the first or a restart.

    torchrun restarts the ranks when one has died, and keeps its key-value store: the run folder is
    recorded there, so that it cannot be confused with another run's. SLURM restarts a whole job,
    whose run folder is the one in its command.
    """

    requeues: int = 0  # times that SLURM requeued this job
    master: tuple[str, int] | None = None  # host and port of the store; None for one rank
    store_stays: bool = False  # True if torchrun keeps the store, which then outlives the ranks
    settings: str | None = None  # run whose settings this one took over; None if its own
    # command line of this program, for messages
    command: str = field(default_factory=partial(command_name, "train"))
    noted_in: Path | None = None  # file for the name of the run folder; None writes none
    began: float | None = None  # monotonic time of the call that trains; None: with the process
    life: Life = field(default_factory=Life)  # of a supervised rank
    absent: frozenset[str] = frozenset()  # experiment trackers whose server did not answer

    def tell(self, line: str) -> None:
        """Say why the run ends before its last step; rank 0 calls it."""
        print(f"{speaker('train')}: {line}", file=sys.stderr, flush=True)

    def end_process(self, code: int) -> None:
        """End this process at once: it is stuck, or was asked a second time to stop."""
        os._exit(code)

    def meeting_store(self, rank: int, world_size: int) -> dist.Store:
        """Return the store in which the ranks of this attempt rendezvous; all ranks call it.

        With torchrun it is a prefix of torchrun's store. Keys of earlier attempts would lead ranks
        to dead processes, and nodes may count restarts differently. So rank 0 draws a new prefix,
        and sends it to each live rank under a key that this rank has just drawn. Raises ConfigError
        if another program has the address.
        """
        if not self.store_stays:
            return meet(rank, world_size, self.master)
        store = self._connect()
        part = _lead(store, world_size) if rank == 0 else _follow(store, rank)
        return dist.PrefixStore(part, store)

    def connect(self) -> dist.Store:
        """Return a new connection to this program's part of the launcher's store."""
        return self._connect()

    def progressed(self) -> None:
        """Tell the supervisor that this process has done more than start."""
        if self.life.progress is not None:
            self.life.progress.write_bytes(b"1")

    def ended(self, code: int) -> None:
        """Tell the supervisor with which code the run has ended, should this process be killed."""
        if self.life.progress is not None:
            self.life.progress.write_text(f"{ENDED_WITH}{code}", encoding="utf-8")

    def note(self, folder: Path) -> None:
        """Record the run folder for the parent, and for later attempts with a secret word that is
        written into it.
        """
        if self.noted_in is not None:
            write_whole(self.noted_in, str(folder.absolute()))
        if self.store_stays:
            word = uuid.uuid4().hex
            with writing(folder):
                write_whole(folder / WORD, word)
            self._connect().set(FOLDER, f"{word} {folder}")

    def earlier(self, run: Run) -> Path | None:
        """Return the run folder that an earlier attempt at this run took, or None.

        Raises OwnError if the folder lacks the secret word recorded in the store: anyone with
        access to the store can write to it.
        """
        if self.store_stays and (store := self._connect()).check([FOLDER]):
            return _noted_folder(store.get(FOLDER))
        if self.requeues and run.run_dir and (Path(run.run_dir) / CONFIG).exists():
            return Path(run.run_dir)
        return None

    def _connect(self) -> dist.Store:
        assert self.master
        return dist.PrefixStore(PREFIX, join_store(*self.master))


@dataclass(frozen=True, slots=True)
class HostedAttempt(Attempt):
    """Start of a run of one rank within a program that continues after it."""

    said: list[str] = field(default_factory=list, compare=False)  # why it ended early

    def tell(self, line: str) -> None:
        """Keep the line for the exception that the program gets."""
        self.said.append(line)

    def end_process(self, code: int) -> None:
        """Interrupt the run at a second stop request. No-op for a stuck one: the watchdog has said
        what it waits for, and the program may interrupt it.
        """
        if code in (STOPPED, INTERRUPTED):
            raise KeyboardInterrupt


def _noted_folder(noted: bytes) -> Path:
    word, _, name = noted.decode(errors="replace").partition(" ")
    folder = Path(name)
    try:
        held = read_regular(folder / WORD).decode()
    except (OSError, ValueError):
        held = None
    if not word or held != word:
        rule = "the launch's store names this folder, which no attempt of this launch has used"
        raise OwnError("run_dir", folder, rule, advice="launch it again with resume=auto")
    return folder


def _lead(store: dist.Store, world_size: int) -> str:
    """Draw a prefix of the store and send it to all live ranks until each has answered."""
    part = uuid.uuid4().hex
    absent = set(range(1, world_size))
    since = time.monotonic()
    while absent:
        if time.monotonic() - since > TIMEOUT.total_seconds():
            raise TimeoutError(f"ranks {sorted(absent)} have not come within {TIMEOUT}")
        for rank in absent:
            if store.check([f"here/{rank}"]):  # one of an earlier attempt gets no answer
                store.set(store.get(f"here/{rank}").decode(), part)
        absent = {rank for rank in absent if not store.check([f"{part}/{rank}"])}
        time.sleep(POLL_S)
    return part


def _follow(store: dist.Store, rank: int) -> str:
    """Return the prefix of the store that rank 0 has drawn."""
    drawn = uuid.uuid4().hex
    store.set(f"here/{rank}", drawn)
    part = store.get(drawn).decode()  # blocks until rank 0 sets it
    store.set(f"{part}/{rank}", "")
    return part
