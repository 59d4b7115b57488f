"""Activations in pinned host memory between forward and backward (`recompute.offload`).

What chosen phases of a layer save is one group per layer and microbatch. A copy to the host starts
when autograd saves a tensor, on a stream of its own. The group stays on the device until the next
layer's forward has ended; compute then waits for the copies, and drops the tensors. The first read
of a group in backward starts to copy back the group of the layer before, on a second stream.

No tensor is in use by a copy when it is freed, and no host buffer when it is filled again, since
compute waits for a copy first, and every copy waits for compute. A step ends with compute waiting
for both streams, so a graph can hold it. On a CPU copies are plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from app.choices import Offload
from app.errors import OwnError
from app.model.block import Phase, StepState
from app.model.chunk import Chunk
from app.model.host_memory import HostMemory, Part
from app.model.layers.layers import Context
from app.model.layers.recompute import BackwardSource, Recomputation, SavedView
from app.plan.formatting import gib
from app.plan.phases import OFFLOADED
from app.plan.recompute import OFFLOADED_FROM, RecomputeChoice
from app.rules.offload import KEY

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
# of a failed allocation: CUDA's, and that of torch without a GPU
FULL = "out of memory", "not enough memory", "can't allocate memory"


@dataclass(slots=True, eq=False)
class OffloadedTensor(BackwardSource):
    """Memory of saved tensors, on the device or on the host."""

    group: OffloadedGroup
    part: Part  # of host memory, at least as large
    host: Tensor  # its values there, flat
    value: Tensor | None  # on the device, flat; None: on the host alone

    def add_reader(self, saved: Tensor) -> None:
        """Do nothing: it is kept until no operation refers to it."""

    def read(self) -> Tensor:
        """Return the flat tensor on the device, after its copy."""
        self.group.arrive()
        assert self.value is not None, "the group has arrived"
        return self.value


@dataclass(slots=True, eq=False)
class OffloadedGroup:
    """Tensors that one layer of one microbatch has offloaded."""

    buffers: HostBuffers
    before: OffloadedGroup | None  # of the layer before, copied back ahead of its backward
    # emptied when it has arrived for backward
    tensors: list[OffloadedTensor] = field(default_factory=list)
    copied: torch.cuda.Event | None = None  # end of the copies to the host
    returned: torch.cuda.Event | None = None  # end of the copies back
    fetched: bool = False

    def drop(self) -> None:
        """Keep the host's copies alone."""
        for tensor in self.tensors:
            tensor.value = None

    def fetch(self) -> None:
        """Start to copy back what is no longer on the device."""
        if not self.fetched:
            self.fetched = True
            self.returned = self.buffers.fetch(self)

    def arrive(self) -> None:
        """Have compute wait for the copies; the first call fetches the layer before."""
        if not self.tensors:
            return
        self.fetch()
        self.buffers.arrived(self)
        self.tensors.clear()
        before = self.before
        while before is not None and not before.tensors:
            before = before.before
        self.before = None
        if before is not None:
            before.fetch()


class HostBuffers(StepState):
    """Host memory of a rank for activations, and the streams of copies to and from it."""

    def __init__(
        self, chunks: Sequence[Chunk], chosen: Collection[Offload], device: torch.device
    ) -> None:
        self.chunks = chunks
        self.chosen = tuple(chosen)
        self.device = device
        self.open = False  # True while phases run whose tensors are offloaded
        self.group: OffloadedGroup | None = None  # of the layer whose forward runs
        self.leaving: OffloadedGroup | None = None  # of the last layer, still on the device
        self.fetching: list[OffloadedGroup] = []  # copies back that compute has not waited for
        self.memory = HostMemory(device)
        self.staying: frozenset[int] = frozenset()  # addresses of parameters and buffers
        self.streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # out, back
        self.apart: set[torch.cuda.Stream] = set()  # those that compute has to wait for
        if device.type == "cuda":
            self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        phases = {phase for part in chosen for phase in OFFLOADED[part]}
        for chunk in chunks:
            chunk.recomputation = partial(OffloadingRecomputation, self)
            for layer in chunk.in_order:
                layer.phases = tuple(
                    replace(phase, run=self._opened(phase)) if phase.name in phases else phase
                    for phase in layer.phases
                )

    @property
    def host_bytes(self) -> int:
        """The most bytes of host memory that tensors have been in at once."""
        return self.memory.most

    def start_step(self) -> None:
        """See `StepState`; there is something to do only after a step that failed."""
        self.end_passes()

    def end_passes(self) -> None:
        """Have compute wait for all copies, and take back all buffers; see `StepState`."""
        for stream in self.apart:
            torch.cuda.current_stream().wait_stream(stream)
        self.apart.clear()
        if self.leaving is not None:
            self.leaving.drop()
        self.leaving = None
        self.fetching.clear()
        self.memory.clear()

    def _opened(self, phase: Phase) -> Callable[..., tuple[object, ...]]:
        def run(*values: object) -> tuple[object, ...]:
            with self.opened(True):
                return phase.run(*values)

        return run

    @contextmanager
    def opened(self, chosen: bool) -> Iterator[None]:
        """Offload what is saved within the block, if `chosen`."""
        before, self.open = self.open, self.open or chosen
        try:
            yield
        finally:
            self.open = before

    def takes(self, saved: Tensor) -> bool:
        """Return whether a tensor saved now is offloaded: a large activation that autograd alone
        would keep.
        """
        if not self.open or self.group is None or saved.layout is not torch.strided:
            return False
        if not saved.is_floating_point() or saved.element_size() < 2:
            return False
        # parameters, and inputs of a stage, which stay for their gradients
        if saved.is_leaf and saved.requires_grad:
            return False
        storage = saved.untyped_storage()
        if not self.staying:
            held = (
                each for chunk in self.chunks for each in (*chunk.parameters(), *chunk.buffers())
            )
            self.staying = frozenset(each.untyped_storage().data_ptr() for each in held)
        return storage.nbytes() >= OFFLOADED_FROM and storage.data_ptr() not in self.staying

    def send(self, saved: Tensor) -> OffloadedTensor:
        """Start to copy the memory of a saved tensor to the host.

        Raises OwnError if the host has no memory for it.
        """
        assert self.group is not None, "a layer runs"
        storage = saved.untyped_storage()
        count = storage.nbytes() // saved.element_size()
        flat = torch.empty(0, dtype=saved.dtype, device=saved.device)
        flat.set_(storage, 0, (count,), (1,))
        try:
            part = self.memory.take(flat.nbytes)
        except RuntimeError as error:
            self._refuse(flat.nbytes, error)
        host = self.memory.of(part, flat)
        with self._beside(back=False):
            host.copy_(flat, non_blocking=True)
        found = OffloadedTensor(self.group, part, host, value=flat)
        self.group.tensors.append(found)
        return found

    def _refuse(self, size: int, error: RuntimeError) -> NoReturn:
        if not any(told in str(error).lower() for told in FULL):
            raise error
        has, more = gib(self.memory.pinned), gib(self.memory.block_for(size))
        rule = f"this rank has pinned {has} GiB of host memory, and gets no {more} GiB more"
        advice = (
            "offload fewer parts, or recompute whole layers instead: recompute.full=true "
            f"recompute.phases=[] {KEY}=[]"
        )
        raise OwnError(KEY, self.chosen, rule, advice=advice) from error

    def _beside(self, back: bool) -> AbstractContextManager[object]:
        """Return a context whose copies start after the compute launched so far, and run beside
        what follows.
        """
        if self.streams is None:
            return nullcontext()
        stream = self.streams[back]
        self.apart.add(stream)
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    @contextmanager
    def layer(self, before: OffloadedGroup | None) -> Iterator[OffloadedGroup]:
        """Gather what the block's layer offloads; then free what the layer before has."""
        group = self.group = OffloadedGroup(self, before)
        try:
            yield group
        finally:
            self.group = None
        self._leave()
        if not group.tensors:
            return
        if self.streams is not None:
            group.copied = self.streams[False].record_event()
        self.leaving = group

    def _leave(self) -> None:
        """Free the last group on the device, after its copies."""
        if self.leaving is not None:
            _wait(self.leaving.copied)
            self.leaving.drop()
            self.leaving = None

    def fetch(self, group: OffloadedGroup) -> torch.cuda.Event | None:
        """Start a group's copies back; return their end."""
        if group is self.leaving:  # still on the device
            self.leaving = None
            return group.copied
        # made by compute, which frees them: it waits for the copies in between
        values = [
            torch.empty(each.host.shape, dtype=each.host.dtype, device=self.device)
            for each in group.tensors
        ]
        self.fetching.append(group)
        with self._beside(back=True):
            for tensor, value in zip(group.tensors, values, strict=True):
                tensor.value = value.copy_(tensor.host, non_blocking=True)
        return None if self.streams is None else self.streams[True].record_event()

    def arrived(self, group: OffloadedGroup) -> None:
        """Have compute wait for a group's copies, after which its buffers are free."""
        _wait(group.returned)
        if group in self.fetching:
            self.fetching.remove(group)
        for tensor in group.tensors:
            self.memory.give(tensor.part)
        self._leave()  # of another microbatch


class OffloadingRecomputation(Recomputation):
    """Recomputation of a microbatch whose chosen phases offload what they save."""

    def __init__(
        self,
        buffers: HostBuffers,
        chosen: RecomputeChoice,
        draws: bool = False,
        replaces: bool = False,
    ) -> None:
        super().__init__(chosen, draws, replaces)
        self.buffers = buffers
        self.last: OffloadedGroup | None = None  # of the layer before
        self.shared: frozenset[int] = frozenset()  # addresses of what all layers read

    def afresh(self) -> Recomputation:
        """Fail: rules refuse the captured intervals that this is for."""
        raise AssertionError("a captured interval of its own offloads nothing")

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Install the hooks around a forward."""
        with self.hooks():
            yield

    def whole_layer(self, layer: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """See `Recomputation`; one group has what the layer offloads."""
        if not torch.is_grad_enabled():
            return layer(*arguments)
        tables = (
            table
            for context in arguments
            if isinstance(context, Context)
            for table in context.rotary.values()
        )
        both = (each for table in tables for each in (table.cos_BS1H, table.sin_BS1H))
        self.shared = frozenset(each.untyped_storage().data_ptr() for each in both)
        whole = Offload.layers in self.chosen.offload
        with self.buffers.layer(self.last) as self.last, self.buffers.opened(whole):
            return super().whole_layer(layer, *arguments)

    def _pack(self, saved: Tensor) -> Tensor | SavedView:
        storage = saved.untyped_storage()
        _, source = self._sources.get(storage._cdata, (None, None))
        if source is None:
            if self.buffers.takes(saved) and storage.data_ptr() not in self.shared:
                self._note(saved, self.buffers.send(saved))
        elif isinstance(source, OffloadedTensor) and source.host.dtype != saved.dtype:
            return saved.detach()  # another type of the same memory, which stays
        return super()._pack(saved)


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
