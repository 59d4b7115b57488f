"""Records of weights: global shape, divided dimensions, initial values.

All code that has to know a weight reads its record: the modules (shape on a rank), the plan
(parameters, buffers, counts), initial values, checkpoints (blocks) and the optimizer (decay, ranks
whose gradients belong together).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from math import prod
from typing import Self


class Initial(Enum):
    """Distribution of initial values."""

    ones = "ones"  # norms
    zeros = "zeros"  # biases
    normal = "normal"  # N(0, model.init_std)
    # N(0, model.init_std / √(2·num_layers)): projections to the residual stream (GPT-2)
    residual = "residual"
    # uniform within ±1/√inputs: the first matrix of an adapter, as `peft` draws it
    kaiming = "kaiming"
    # logarithm of a uniform number from 0.01 to 16: rates of decay of linear attention
    log_uniform = "log_uniform"


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the whole model, and the dimension that each parallel axis divides.

    Stacked gate and up projections are a dimension of their own, so that equal parts of the other
    dimensions hold as much of either.
    """

    shape: tuple[int, ...]
    tp: int | None = None  # dimension that tensor parallelism divides
    ep: int | None = None  # dimension that expert parallelism divides: that of the experts, 0
    etp: int | None = None  # dimension that expert tensor parallelism divides
    gate_up: int | None = None  # dimension of gate and up; merged with the next one in the tensor
    initial: Initial = Initial.normal
    decay: bool = True  # weight decay applies
    # matrix of linear layers or experts; not a norm, bias, table of tokens, router or gate
    linear: bool = True
    # of a weight in which rows of several matrices alternate: rows of each in turn
    fused: tuple[int, ...] = ()
    trained: bool = True  # False for a parameter of `train.frozen`
    adapters: tuple[Adapter, ...] = ()  # of `lora.targets`, trained beside it
    rank: int | None = None  # of the adapter that it belongs to

    @property
    def keeps_input(self) -> bool:
        """True if backward reads the input, for a gradient of this weight or of an adapter."""
        return self.trained or bool(self.adapters)

    @property
    def expert(self) -> bool:
        """True if it belongs to routed experts, which lie on the expert grid."""
        return self.ep is not None

    @property
    def replicated(self) -> bool:
        """True for a replicated weight: every tensor-parallel rank holds all of it, for its own
        tokens or heads; of experts every expert-tensor-parallel one.

        Its gradients must then be summed over these ranks.
        """
        return (self.etp if self.expert else self.tp) is None

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Pair of matrices of rank r whose matmul is added to (part of) a weight (LoRA, arXiv
    2106.09685).

    Its outputs are units `first` to `stop` of every `of` units of the weight's outputs. A unit is
    one output if matrices alternate there, otherwise as large as `of` of them make all outputs.
    """

    name: str  # of the linear layer, as in Hugging Face models
    a: Weight  # r × inputs; experts: expert × inputs × r
    b: Weight  # outputs × r; experts: expert × r × outputs
    first: int = 0
    stop: int = 1
    of: int = 1
    alternates: bool = False

    def weights(self, path: str) -> Iterator[tuple[str, Weight]]:
        """Yield both matrices with their names, given that of the weight."""
        module = path.removesuffix(".weight")  # other names are those of modules
        yield f"{module}.{self.name}.a", self.a
        yield f"{module}.{self.name}.b", self.b

    def all_outputs(self, own: int) -> int:
        """Return the outputs of the weight, given the number of its own."""
        return own // (self.stop - self.first) * self.of

    def outputs(self, count: int) -> tuple[int, int, int]:
        """Return (period, start, stop) of its outputs among `count` ones of the weight."""
        unit = 1 if self.alternates else count // self.of
        return self.of * unit, self.first * unit, self.stop * unit


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the model.

    Its fields are its weights and inner parts, by the names and in the order in which the part's
    module registers them; None if this model has none.
    """

    def numel(self) -> int:
        """Return the elements of all its weights."""
        return sum(weight.numel for _, weight in self.weights())

    def weights(self, path: str = "") -> Iterator[tuple[str, Weight]]:
        """Yield every weight with its name: `path`, then the path of fields."""
        for field in fields(self):
            inner = getattr(self, field.name)
            if isinstance(inner, Weight):
                yield path + field.name, inner
                for adapter in inner.adapters:
                    yield from adapter.weights(path + field.name)
            elif isinstance(inner, Part):
                yield from inner.weights(f"{path}{field.name}.")

    def without(self, frozen: Collection[str], path: str = "") -> Self:
        """Return the part with the weights of these names not trained."""
        changed: dict[str, Weight | Part] = {}
        for field in fields(self):
            inner, name = getattr(self, field.name), path + field.name
            if isinstance(inner, Weight) and name in frozen:
                changed[field.name] = replace(inner, trained=False)
            elif isinstance(inner, Part):
                changed[field.name] = inner.without(frozen, f"{name}.")
        return replace(self, **changed)
