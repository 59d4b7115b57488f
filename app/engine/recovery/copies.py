"""Copies of a rank's state, and of the state of the rank whose partner it is; they outlive engines.

Number n of the copies is in slot n mod 2, here and at the partner (`app.plan.partners`). Copying
and sending copy n leaves copy n-1 untouched, and begins only after all ranks have copy n-1. So
whenever a rank dies, its partner and all others have a copy with the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.data.feed import Cursor
from app.engine.checkpoint.load import Progress, RankFile, fill_engine
from app.engine.files.names import LEFT_OUT, SCALES, rank_file
from app.engine.ranks.groups import Groups
from app.engine.recovery.slot import PART, OnlyMetadata, Slot
from app.engine.step.engine import Engine
from app.optim.frozen import together


@dataclass(frozen=True, slots=True)
class Offer:
    """Copies that a rank has, told to all others."""

    own: dict[int, int]  # number of a copy of its own state -> step
    held: dict[int, int]  # the same of the rank whose partner it is
    restarts: int  # times that the rank was started again
    died_at: float  # when its process before died, seconds since 1970; 0: it did not
    step: int  # last step that the rank has taken
    damaged: int  # copies whose sum is wrong


@dataclass(frozen=True, slots=True)
class Agreed:
    """Copies that all ranks continue from, and why."""

    serial: int
    step: int
    offers: tuple[Offer, ...]  # by rank
    headers: tuple[dict[str, Any], ...]  # by rank


@dataclass(slots=True)
class Copies:
    """Two copies of this rank's state and two of another rank's."""

    rank: int
    world_size: int
    shift: int  # the partner is so many ranks above
    pinned: bool
    serial: int = 0  # of the newest copy begun
    own: tuple[Slot, Slot] = field(init=False)
    held: tuple[Slot, Slot] = field(init=False)

    def __post_init__(self) -> None:
        self.own = Slot(self.pinned), Slot(self.pinned)
        self.held = Slot(False), Slot(False)

    @property
    def partner(self) -> int:
        """Return the rank that holds copies of this one."""
        return (self.rank + self.shift) % self.world_size

    @property
    def kept(self) -> int:
        """Return the rank of which this one holds copies."""
        return (self.rank - self.shift) % self.world_size

    def swap(self, group: dist.ProcessGroup) -> None:
        """Send the newest copy to the partner, and receive that of the other rank; all ranks call
        it. Returns when all have theirs. Raises RuntimeError if a copy arrives changed.
        """
        here, there = self.own[self.serial % 2], self.held[self.serial % 2]
        text = torch.frombuffer(bytearray(here.header_bytes()), dtype=torch.uint8)
        sizes = torch.tensor([text.numel()])
        arrived = torch.empty_like(sizes)
        self._shift(sizes, arrived, group)
        header = torch.empty(int(arrived), dtype=torch.uint8)
        self._shift(text, header, group)
        serial = there.take_header(header.numpy().tobytes())
        there.fit(there.header["size"])
        self._shift(here.content, there.content, group)
        if serial != self.serial or there.sum() != there.crc:
            raise RuntimeError(f"copy {serial} of rank {self.kept} arrived changed")
        there.serial = serial
        dist.barrier(group)

    def _shift(self, out: Tensor, into: Tensor, group: dist.ProcessGroup) -> None:
        """Send bytes to the partner while those of the other rank arrive, part by part."""
        sent = _begin_send(out.split(PART), self.partner, group)
        answer = _receive(into.split(PART), self.kept, group)
        _end_send(sent, self.partner, group)
        _wait([answer])

    def agree(
        self, groups: Groups, restarts: int, died_at: float, step: int
    ) -> tuple[Agreed | None, tuple[Offer, ...]]:
        """Choose the newest copies that are there of every rank; ranks without their own get them
        from their partners. All ranks call it. None: there are no such copies.
        """
        bad = [slot for slot in (*self.own, *self.held) if slot.serial and not slot.is_whole()]
        for slot in bad:
            slot.serial = 0
        own, held = (
            {slot.serial: slot.header["manifest"]["step"] for slot in slots if slot.serial}
            for slots in (self.own, self.held)
        )
        offers: list[Any] = [None] * self.world_size
        mine = Offer(own, held, restarts, died_at, step=step, damaged=len(bad))
        dist.all_gather_object(offers, mine, group=groups.host)
        everyone = range(self.world_size)
        of = {rank: offers[(rank + self.shift) % self.world_size].held for rank in everyone}
        common = set.intersection(*({*offers[rank].own, *of[rank]} for rank in everyone))
        for slot in (*self.own, *self.held):  # later numbers will be used again
            if slot.serial > max(common, default=0):
                slot.serial = 0
        self.serial = max(common, default=0)
        if not common:
            return None, tuple(offers)
        for rank in everyone:
            if self.serial not in offers[rank].own:
                self._give(rank, groups.host)
        header = {
            key: value
            for key, value in self.own[self.serial % 2].header.items()
            if key in ("metadata", "left_out")
        }
        headers: list[Any] = [None] * self.world_size
        dist.all_gather_object(headers, header, group=groups.host)
        step = self.own[self.serial % 2].header["manifest"]["step"]
        return Agreed(self.serial, step, tuple(offers), tuple(headers)), tuple(offers)

    def _give(self, rank: int, group: dist.ProcessGroup) -> None:
        """Bring the agreed copy of `rank` from its partner back to it."""
        partner = (rank + self.shift) % self.world_size
        if self.rank == partner:
            slot = self.held[self.serial % 2]
            text = torch.frombuffer(bytearray(slot.header_bytes()), dtype=torch.uint8)
            for tensor in (torch.tensor([text.numel()]), text, slot.content):
                sent = _begin_send(tensor.split(PART), rank, group)
                _end_send(sent, rank, group)
        if self.rank == rank:
            slot = self.own[self.serial % 2]
            size = torch.zeros(1, dtype=torch.int64)
            _wait([_receive([size], partner, group)])
            header = torch.empty(int(size), dtype=torch.uint8)
            _wait([_receive(header.split(PART), partner, group)])
            serial = slot.take_header(header.numpy().tobytes())
            slot.fit(slot.header["size"])
            _wait([_receive(slot.content.split(PART), partner, group)])
            if slot.sum() != slot.crc:
                raise RuntimeError(f"the copy of rank {rank} came back changed from {partner}")
            slot.serial = serial

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the agreed copy, as that of a checkpoint; of this rank's parts."""
        header = self.own[self.serial % 2].header
        found: dict[str, Any] = dict(header["manifest"])
        if header["left_out"]:
            found[LEFT_OUT] = header["left_out"]
        return found

    def restore(self, engine: Engine, agreed: Agreed) -> tuple[Progress, Cursor]:
        """Fill an engine from the agreed copies; all ranks call it. Raises ConfigError, the same on
        every rank, if frozen weights have changed since.
        """
        slot, layout = self.own[self.serial % 2], engine.groups.layout
        parts: dict[str, Any] = {}
        for name, (shape, start, stop, part) in slot.header["parts"]:
            entry = parts.setdefault(name, {"shape": shape, "held": []})
            entry["held"].append((self.rank, start, stop, part))
        ranks = range(self.world_size)
        manifest = {
            **slot.header["manifest"],
            "files": {rank_file(r): {"dp_rank": layout.coords(r)["dp"]} for r in ranks},
            "parts": parts,
            "routers": dict.fromkeys(slot.header["routers"], self.rank),
            SCALES: dict.fromkeys(slot.header["scales"], self.rank),
            LEFT_OUT: together(each["left_out"] for each in agreed.headers),
        }
        opened = {r: OnlyMetadata(agreed.headers[r]["metadata"]) for r in ranks}
        files: dict[int, RankFile] = {**opened, self.rank: slot}
        progress, state = fill_engine(
            Path(f"copies of step {agreed.step}"), manifest, engine, opened=files
        )
        return progress, Cursor.from_state(state)


# When a rank dies, gloo fails only operations that have not begun (`Pair::signalException` in its
# transport/tcp/pair.cc): one under way waits until the group's timeout, which is hours. So the
# sender appends a message of one byte and the receiver answers with another; each side waits for
# the small message before the large ones.


def _begin_send(
    parts: Sequence[Tensor], rank: int, group: dist.ProcessGroup
) -> list[dist.Work | None]:
    return [dist.isend(part, rank, group=group) for part in (*parts, _one_byte())]


def _end_send(sent: Sequence[dist.Work | None], rank: int, group: dist.ProcessGroup) -> None:
    """Wait until a rank has all that was sent to it. Raises RuntimeError if it has died."""
    dist.recv(_one_byte(), rank, group=group)
    _wait(sent)


def _receive(parts: Sequence[Tensor], rank: int, group: dist.ProcessGroup) -> dist.Work | None:
    """Fill tensors with what a rank sends, and return the send of the answer, for the caller to
    wait for: it ends in that rank's `_end_send`. Raises RuntimeError if the rank has died.
    """
    *got, end = (dist.irecv(part, rank, group=group) for part in (*parts, _one_byte()))
    _wait([end, *got])
    return dist.isend(_one_byte(), rank, group=group)


def _one_byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
