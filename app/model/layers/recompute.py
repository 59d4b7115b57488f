"""Recomputation of activations in backward (Chen et al. 2016), by names of `Recompute`.

`app.plan.recompute.RecomputePolicy` says what is recomputed; a microbatch's context passes it to
every layer.

There are two ways. `checkpoint` saves only a function's arguments, and backward reruns the function
for its gradients. `discard_output` lets a function save what it needs but drops its result; when
backward of a later operation asks for it, it is recomputed from the function's arguments. That
suits cheap functions before a GEMM.

With the same hooks `replace` lets backward read a tensor from elsewhere, for example from the paged
activation buffer.
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
    """Source from which backward obtains a tensor that was not saved itself."""

    @abstractmethod
    def add_reader(self, saved: Tensor) -> None:
        """Count one more operation that saved a tensor of this memory; its values are still
        there.
        """

    @abstractmethod
    def read(self) -> Tensor:
        """Return the tensor in new memory; called once per reader."""


@dataclass(slots=True)
class _Function(BackwardSource):
    """Function and arguments that recompute a result, and the number of operations that read it."""

    function: Callable[..., Tensor]
    arguments: tuple[Tensor | SavedView, ...]
    readers: int = 0  # saved references that have not been read yet
    value: Tensor | None = None

    def add_reader(self, saved: Tensor) -> None:
        """Count the reader."""
        self.readers += 1

    def read(self) -> Tensor:
        """Return the result; it is kept until the last reader has it."""
        if self.value is None:
            with torch.no_grad():
                self.value = self.function(*map(_unpack, self.arguments))
        value = self.value
        self.readers = self.readers - 1
        if not self.readers:
            self.value = None
        return value


@dataclass(frozen=True, slots=True)
class SavedView:
    """Saved tensor that is a view of a discarded result."""

    source: BackwardSource
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(slots=True)
class Recomputation:
    """Recomputes what is chosen, for one microbatch in one chunk."""

    chosen: RecomputeChoice = NOTHING
    # True if functions under `checkpoint` draw random numbers, which a rerun has to repeat
    draws: bool = False
    replaces: bool = False  # True if `replace` may be called
    # id of a result's storage -> a weak reference to it, and where backward has it from
    _sources: dict[int, tuple[StorageWeakRef, BackwardSource]] = field(default_factory=dict)
    _inside: int = 0  # depth of functions under `checkpoint`, which save nothing anyway
    _running: bool = False  # within `forward`, and not within a recomputation

    def afresh(self) -> Recomputation:
        """Return a copy without the results noted in another forward, for an interval with hooks of
        its own such as a captured one.
        """
        return Recomputation(self.chosen, self.draws, self.replaces)

    def whole_layer(self, layer: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Return layer(*arguments); saves only the arguments if whole layers are recomputed (Chen
        et al. 2016).
        """
        if not self.chosen.whole_layers or not torch.is_grad_enabled():
            return layer(*arguments)
        result: T = checkpoint(
            layer, *arguments, use_reentrant=False, preserve_rng_state=self.draws
        )
        return result

    def recomputes(self, part: Recompute) -> bool:
        """Return whether backward recomputes this part of a layer."""
        return part in self.chosen.parts

    def checkpoint(self, part: Recompute, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Return function(*arguments); saves only the arguments if `part` is recomputed."""
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
        """Discard `out` (no view) after forward if `part` is recomputed; function(*arguments)
        recomputes it.
        """
        if part in self.chosen.parts and not self._inside and torch.is_grad_enabled():
            self._note(out, _Function(function, tuple(map(self._pack, arguments))))

    def replace(self, value: Tensor, source: BackwardSource) -> None:
        """Have operations that save `value`, or a view of it, read it from `source` in backward."""
        assert self.replaces, "construct Recomputation with replaces=True"
        if self._running:
            self._note(value, source)

    def _note(self, value: Tensor, source: BackwardSource) -> None:
        storage = value.untyped_storage()
        # the weak reference keeps the address from being taken for that of a later storage
        self._sources[storage._cdata] = StorageWeakRef(storage), source

    def checkpoint_and_discard(
        self, part: Recompute, function: Callable[[Tensor], Tensor], argument: Tensor
    ) -> Tensor:
        """Return function(argument); saves only the argument if `part` is recomputed."""
        if part not in self.chosen.parts:
            return function(argument)
        out = self.checkpoint(part, function, argument)
        self.discard_output(part, out, function, argument)
        return out

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Install the hooks around a forward that calls `discard_output` or `replace`."""
        if not (self.chosen.parts or self.replaces):
            yield
            return
        with self.hooks():
            yield

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Install the hooks around a forward, whatever is recomputed."""
        self._running = True
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self._running = False
        self._sources.clear()

    def _pack(self, saved: Tensor) -> Tensor | SavedView:
        _, source = self._sources.get(saved.untyped_storage()._cdata, (None, None))
        if source is None:
            # saving the tensor itself creates a reference cycle if an operation saves its output
            return saved.detach()
        source.add_reader(saved)
        return SavedView(source, saved.size(), saved.stride(), offset=saved.storage_offset())


def _unpack(packed: Tensor | SavedView) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    return packed.source.read().as_strided(packed.size, packed.stride, packed.offset)
