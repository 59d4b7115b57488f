"""Values that backward recomputes instead of keeping (Chen et al. 2016), by names of `Recompute`.

What is recomputed is said by `app.plan.recompute.RecomputePolicy`; a microbatch's context brings it
to every layer.

Two ways. `checkpoint` keeps of a function only its arguments, and backward runs it once more for
its own gradients. `discard_output` lets a function keep what it needs, but drops its result: what
later operations would save of it is computed again from the function's arguments when their
backward asks for it. That suits cheap functions in front of matrix products.

By the same hooks `replace` has backward read a tensor from another place than its memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from app.choices import Recompute
from app.plan.recompute import NOTHING, RecomputeChoice

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class BackwardSource(ABC):
    """Where backward has a tensor from that is not kept as it is."""

    @abstractmethod
    def add_reader(self, saved: Tensor) -> None:
        """One more operation has saved a tensor in this memory, whose values are still there."""

    @abstractmethod
    def read(self) -> Tensor:
        """The tensor in new memory; once for every reader."""


Keep = Callable[[Tensor], BackwardSource]  # for a tensor whose values are there later


@dataclass(slots=True)
class _Function(BackwardSource):
    """How to compute a result again, and for how many operations."""

    function: Callable[..., Tensor]
    arguments: tuple[Tensor | _View, ...]
    readers: int = 0  # saved references that have not been read yet
    value: Tensor | None = None

    def add_reader(self, saved: Tensor) -> None:
        """Count it."""
        self.readers += 1

    def read(self) -> Tensor:
        """The result; kept until the last reader has it."""
        if self.value is None:
            with torch.no_grad():
                self.value = self.function(*map(_unpack, self.arguments))
        value = self.value
        self.readers = self.readers - 1
        if not self.readers:
            self.value = None
        return value


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor in the memory of a result that is not kept."""

    source: BackwardSource
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(slots=True)
class Recomputation:
    """Carries out what is to be recomputed of one microbatch in one chunk."""

    chosen: RecomputeChoice = NOTHING
    # whether functions under `checkpoint` draw random numbers, which have to be the same again
    draws: bool = False
    replaces: bool = False  # whether `replace` may be called
    # id of a result's storage -> a weak reference to it, and where backward has it from
    _sources: dict[int, tuple[StorageWeakRef, BackwardSource]] = field(default_factory=dict)
    _inside: int = 0  # depth of functions under `checkpoint`, of which nothing is kept anyway
    _running: bool = False  # within `forward`, and not in what backward computes again

    def afresh(self) -> Recomputation:
        """The same choice without what another forward has noted: for one with hooks of its own, as
        a captured interval has.
        """
        return Recomputation(self.chosen, self.draws, self.replaces)

    def whole_layer(self, layer: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """layer(*arguments), of which only the arguments are kept if whole layers are recomputed
        (Chen et al. 2016).
        """
        if not self.chosen.whole_layers or not torch.is_grad_enabled():
            return layer(*arguments)
        result: T = checkpoint(
            layer, *arguments, use_reentrant=False, preserve_rng_state=self.draws
        )
        return result

    def recomputes(self, part: Recompute) -> bool:
        """Whether backward computes this part of a layer again."""
        return part in self.chosen.parts

    def checkpoint(self, part: Recompute, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """function(*arguments), of which only the arguments are kept if `part` is recomputed."""
        if part not in self.chosen.parts or self._inside or not torch.is_grad_enabled():
            return function(*arguments)
        result: T = checkpoint(
            self._within, function, *arguments, use_reentrant=False, preserve_rng_state=self.draws
        )
        return result

    def _within(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        self._inside += 1
        try:
            return function(*arguments)
        finally:
            self._inside -= 1

    def discard_output(
        self, part: Recompute, out: Tensor, function: Callable[..., Tensor], *arguments: Tensor
    ) -> None:
        """`out`, no view, is discarded after forward if `part` is recomputed: function(*arguments)
        makes it again.
        """
        if part in self.chosen.parts and not self._inside and torch.is_grad_enabled():
            self._note(out, _Function(function, tuple(map(self._pack, arguments))))

    def replace(self, value: Tensor, source: BackwardSource) -> None:
        """Operations that save `value`, or a part of it, have it from `source` in backward."""
        assert self.replaces, "hooks are there for it"
        if self._running:
            self._note(value, source)

    def _note(self, value: Tensor, source: BackwardSource) -> None:
        storage = value.untyped_storage()
        # the reference keeps its identity from another use
        self._sources[storage._cdata] = StorageWeakRef(storage), source

    def checkpoint_and_discard(
        self, part: Recompute, function: Callable[[Tensor], Tensor], argument: Tensor
    ) -> Tensor:
        """function(argument), of which only the argument is kept if `part` is recomputed."""
        if part not in self.chosen.parts:
            return function(argument)
        out = self.checkpoint(part, function, argument)
        self.discard_output(part, out, function, argument)
        return out

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward that calls `discard_output` or `replace`."""
        if not (self.chosen.parts or self.replaces):
            yield
            return
        self._running = True
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self._running = False
        self._sources.clear()

    def _pack(self, saved: Tensor) -> Tensor | _View:
        _, source = self._sources.get(saved.untyped_storage()._cdata, (None, None))
        if source is None:
            return saved.detach()  # itself would be a cycle where an operation saves its own result
        source.add_reader(saved)
        return _View(source, saved.size(), saved.stride(), offset=saved.storage_offset())


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    return packed.source.read().as_strided(packed.size, packed.stride, packed.offset)
