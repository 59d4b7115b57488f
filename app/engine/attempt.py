"""Going on after a restart: the processes of one launch are started again, and find the run folder they had before."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from app.engine.groups import TIMEOUT
from app.engine.run_folder import CONFIG

PREFIX = "graphfold"  # of our keys in a store that others use too
FOLDER = "run_dir"  # key of the run folder
POLL_S = 0.01  # seconds between looks for ranks that have come


@dataclass(frozen=True, slots=True)
class Attempt:
    """One of the times that a launch starts its ranks.

    torchrun starts them again when one has died, and keeps a key-value store throughout: there the run folder is noted, so
    that no other run's can be taken for it. SLURM starts a whole job again; its run folder is the one that it was given.
    """

    requeues: int = 0  # times that SLURM has started this job again
    store: tuple[str, int] | None = None  # host and port of torchrun's store; None: there is none that outlives the ranks

    def meeting_store(self, rank: int, world_size: int) -> dist.Store | None:
        """The part of torchrun's store in which the ranks of this attempt meet; all call it. None: there is no store.

        What earlier attempts have left there would lead ranks to processes that have died, and nodes may count their restarts
        differently: so rank 0 names the part anew, and tells each rank that is there now under what it has just drawn.
        """
        if self.store is None:
            return None
        store = self._connect()
        part = _lead(store, world_size) if rank == 0 else _follow(store, rank)
        return dist.PrefixStore(part, store)

    def note(self, folder: Path) -> None:
        """Note the run folder for the attempts to come."""
        if self.store:
            self._connect().set(FOLDER, str(folder))

    def earlier(self, run_dir: str | None) -> Path | None:
        """The run folder that an earlier attempt took, None where there was none; `run_dir` is what the run was given."""
        if self.store and (store := self._connect()).check([FOLDER]):
            return Path(store.get(FOLDER).decode())
        if self.requeues and run_dir and (Path(run_dir) / CONFIG).exists():
            return Path(run_dir)
        return None

    def _connect(self) -> dist.Store:
        assert self.store
        return dist.PrefixStore(PREFIX, dist.TCPStore(*self.store, is_master=False, timeout=TIMEOUT))


def _lead(store: dist.Store, world_size: int) -> str:
    """Name a part of the store, and tell it every rank that is there until all have answered."""
    part, absent, since = uuid.uuid4().hex, set(range(1, world_size)), time.monotonic()
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
