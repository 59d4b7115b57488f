"""Going on after a restart: processes of one launch that start again find their run folder."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from app.config import Run
from app.engine.run.meeting import TIMEOUT, join_store, meet
from app.engine.run.run_folder import CONFIG
from app.errors import OwnError, writing

PREFIX = "graphfold"  # of our keys in a store that others use too
FOLDER = "run_dir"  # key of the run folder
WORD = ".attempt"  # a file in it, which says the same as the store: nobody else can make one there
POLL_S = 0.01  # seconds between looks for ranks that have come


@dataclass(frozen=True, slots=True)
class Attempt:
    """One of the times that a launch starts its ranks.

    torchrun starts them again when one has died, and keeps a key-value store throughout: there the
    run folder is noted, so that no other run's can be taken for it. SLURM starts a whole job again;
    its run folder is the one that it was given.
    """

    requeues: int = 0  # times that SLURM has started this job again
    master: tuple[str, int] | None = None  # host and port where the ranks meet; None: one rank
    store_stays: bool = False  # torchrun keeps the store there, which outlives the ranks
    settings: str | None = None  # whose settings the run continues with; None: it has its own
    command: str = "python train.py"  # that starts this program by hand

    def meeting_store(self, rank: int, world_size: int) -> dist.Store:
        """The store in which the ranks of this attempt meet; all call it.

        It is a part of torchrun's where there is one. What earlier attempts have left there would
        lead ranks to processes that have died, and nodes may count their restarts differently: so
        rank 0 names the part anew, and tells each rank that is there now under what it has just
        drawn. Raises ConfigError where another program is at the address.
        """
        if not self.store_stays:
            return meet(rank, world_size, self.master)
        store = self._connect()
        part = _lead(store, world_size) if rank == 0 else _follow(store, rank)
        return dist.PrefixStore(part, store)

    def note(self, folder: Path) -> None:
        """Note the run folder for the attempts to come, with a word that only it holds."""
        if self.store_stays:
            word = uuid.uuid4().hex
            with writing(folder):
                (folder / WORD).write_text(word, encoding="utf-8")
            self._connect().set(FOLDER, f"{word} {folder}")

    def earlier(self, run: Run) -> Path | None:
        """The run folder that an earlier attempt at this run took; None: there was none.

        Raises OwnError where the folder does not hold the word that the store gives with it:
        whoever reaches a store can write there.
        """
        if self.store_stays and (store := self._connect()).check([FOLDER]):
            return _noted_folder(store.get(FOLDER))
        if self.requeues and run.run_dir and (Path(run.run_dir) / CONFIG).exists():
            return Path(run.run_dir)
        return None

    def _connect(self) -> dist.Store:
        assert self.master
        return dist.PrefixStore(PREFIX, join_store(*self.master))


def _noted_folder(noted: bytes) -> Path:
    word, _, name = noted.decode(errors="replace").partition(" ")
    folder = Path(name)
    try:
        held = (folder / WORD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        held = None
    if not word or held != word:
        rule = "the launch's store names this folder, in which no attempt of this launch has been"
        raise OwnError("run_dir", folder, rule, advice="launch it again with resume=auto")
    return folder


def _lead(store: dist.Store, world_size: int) -> str:
    """Name a part of the store, and tell it every rank that is there until all have answered."""
    part = uuid.uuid4().hex
    absent = set(range(1, world_size))
    since = time.monotonic()
    while absent:
        if time.monotonic() - since > TIMEOUT.total_seconds():
            raise TimeoutError(f"ranks {sorted(absent)} have not come within {TIMEOUT}")
        for rank in absent:
            if store.check([f"here/{rank}"]):  # may be of an earlier attempt: then nobody answers
                store.set(store.get(f"here/{rank}").decode(), part)
        absent = {rank for rank in absent if not store.check([f"{part}/{rank}"])}
        time.sleep(POLL_S)
    return part


def _follow(store: dist.Store, rank: int) -> str:
    """The part of the store that rank 0 has named."""
    drawn = uuid.uuid4().hex
    store.set(f"here/{rank}", drawn)
    part = store.get(drawn).decode()  # waits for it
    store.set(f"{part}/{rank}", "")
    return part
