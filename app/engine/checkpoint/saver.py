"""Save a run's checkpoints one at a time, synchronously or beside training."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.checkpoint.load import Progress
from app.engine.checkpoint.save import RankState, current_state, point_to, write_checkpoint
from app.engine.files.checkpoints import (
    checkpoint_name,
    fault_of_latest,
    is_whole,
    newest_checkpoint,
    temporary_folder,
)
from app.engine.files.names import rank_file
from app.engine.ranks.groups import host_group
from app.engine.step.engine import Engine
from app.engine.watchdog.missing import SAVING
from app.errors import warn
from app.plan.formatting import byte_count


class Saver:
    """Writer of a run's checkpoints, in a thread with `checkpoint.asynchronous`.

    At most one save is under way: the next waits for it. The writing thread calls `failed` when a
    save fails; `wait` then raises on every rank what a synchronous save would have raised.
    `origin` holds manifest entries known to rank 0 only: the data record and the program version.
    """

    def __init__(
        self,
        engine: Engine,
        failed: Callable[[], None],
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        self._failed = failed
        self._origin = origin
        self.run = engine.plan.run
        self._beside = bool(self.run.checkpoint.interval) and self.run.checkpoint.asynchronous
        self._group = self._own_group() if self._beside else engine.groups.host
        self._held: dict[str, Tensor] = {}  # host copies, reused by every save
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._told: set[str] = set()
        self._file = Path()  # file that this rank writes
        self._bytes = 0  # its final size
        # seconds; None if nothing was saved since the last call of `blocked`
        self._blocked: float | None = None

    def _own_group(self) -> dist.ProcessGroup:
        watchdog = self.engine.watchdog
        watchdog.meet("creating the process group of checkpoints")
        group = host_group(list(range(dist.get_world_size())))
        watchdog.follow({SAVING: group})
        watchdog.rest("building the model")
        return group

    def save(self, folder: Path, progress: Progress, cursor: dict[str, Any]) -> Path:
        """Save the present state; returns the folder. All ranks call it. Raises as `wait`."""
        since = time.perf_counter()
        self.wait()
        state = current_state(self.engine, self.run, progress, cursor=cursor, origin=self._origin)
        name = checkpoint_name(progress.step)
        self._bytes = sum(tensor.nbytes for tensor in state.tensors.values())
        self._file = temporary_folder(folder / name) / rank_file(state.rank)
        if self._beside:
            state = dataclasses.replace(state, tensors=self._copied(state.tensors))
            self._thread = threading.Thread(
                target=self._write, args=(folder, state), daemon=True, name="checkpoint"
            )
            self._thread.start()
        else:
            activity = self.engine.watchdog.main
            write_checkpoint(folder, state, self._group, activity=activity, tell=self._tell)
        self._blocked = time.perf_counter() - since
        return folder / name

    def wait(self) -> None:
        """Wait for the save under way. Raises ConfigError, the same on all ranks, if it failed."""
        if self._thread is not None:
            self.engine.watchdog.rest("waiting for the checkpoint before")
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def progress(self) -> str:
        """Say how much of its file this rank has written."""
        with suppress(OSError):  # no temporary file: not begun yet, or already renamed
            done = self._file.stat().st_size / self._bytes
            return (
                f"{min(done, 1.0):.0%} of the {byte_count(self._bytes)} of rank "
                f"{self.engine.groups.rank}"
            )
        return ""

    def blocked(self) -> float | None:
        """Return the seconds that saves blocked training since the last call, or None."""
        seconds = self._blocked
        self._blocked = None
        return seconds

    def name_newest(self, run_dir: Path) -> None:
        """Let `latest` name the newest whole checkpoint of a run's folder; rank 0 calls it.

        A run killed between a save and its name resumes there, and may have nothing more to save.
        """
        newest = newest_checkpoint(run_dir)
        named = newest is not None and newest.name.startswith("step-")  # no hidden one
        if newest is not None and named and is_whole(newest) and fault_of_latest(newest):
            point_to(newest, self._tell)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warn(text)

    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        pinned = self.engine.device.type == "cuda"
        for name, tensor in tensors.items():
            if name not in self._held:
                self._held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._held[name].copy_(tensor, non_blocking=True)
        if pinned:
            # the next update overwrites the tensors being copied
            torch.cuda.current_stream(self.engine.device).synchronize()
        return {name: self._held[name] for name in tensors}

    def _write(self, folder: Path, state: RankState) -> None:
        try:
            activity = self.engine.watchdog.saving
            write_checkpoint(folder, state, self._group, activity=activity, tell=self._tell)
        except Exception as error:  # raised again by `wait`
            self._error = error
            self._failed()
        finally:
            self.engine.watchdog.saving.rest()
