"""What a part of the model says of its weights: a record for each, before anything is cut.

Everything that has to know a weight reads its record: the modules (shape on a rank), the plan
(parameters, buffers, counts), initial values, checkpoints (blocks) and the optimizer (decay, which
ranks' gradients belong together).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from math import prod


class Initial(Enum):
    """Kind of initial values."""

    ones = "ones"  # norms
    zeros = "zeros"  # biases
    normal = "normal"  # N(0, model.init_std)
    # N(0, model.init_std / √(2·num_layers)): what writes to the residual stream (GPT-2)
    residual = "residual"


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the whole model, and which of its dimensions each kind of rank has a part of.

    Where gate and up projection are stacked, they are a dimension of their own, so that equal parts
    of the other dimensions have as much of either.
    """

    shape: tuple[int, ...]
    tp: int | None = None  # dimension that tensor-parallel ranks cut
    ep: int | None = None  # dimension that expert-parallel ranks cut: that of the experts, 0
    etp: int | None = None  # dimension that expert-tensor-parallel ranks cut
    gate_up: int | None = None  # dimension of gate and up; in the tensor one with the next
    initial: Initial = Initial.normal
    decay: bool = True  # weight decay applies

    @property
    def expert(self) -> bool:
        """Whether it belongs to routed experts, which lie on a grid of ranks of their own."""
        return self.ep is not None

    @property
    def replica(self) -> bool:
        """Whether all tensor-parallel ranks hold it whole, and use it on their own tokens or heads
        only: their gradients are parts of a sum.
        """
        return self.tp is None and not self.expert

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the model. Its fields are its weights and the parts inside it, in the order in
    which the module of the part registers them and by the same names; None: this model has none.
    """

    def numel(self) -> int:
        """Elements of all its weights."""
        return sum(weight.numel for _, weight in self.weights())

    def weights(self, path: str = "") -> Iterator[tuple[str, Weight]]:
        """Every weight with its name: `path`, then the path of fields."""
        for field in fields(self):
            inner = getattr(self, field.name)
            if isinstance(inner, Weight):
                yield path + field.name, inner
            elif isinstance(inner, Part):
                yield from inner.weights(f"{path}{field.name}.")
