"""Flatten the tensors of frozen records into a list and rebuild them, as `torch.utils._pytree`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
# from tensors in the order of `flatten` to a value of the original structure
Rebuild = Callable[[Sequence[Tensor]], T]


def flatten(value: T) -> tuple[list[Tensor], Rebuild[T]]:
    """Return the tensors of a value, and a function that rebuilds it from other tensors.

    Looks into dictionaries, tuples and dataclasses; everything else is kept as it is. The function
    keeps no tensor alive.
    """
    kind = type(value)
    tensors, make = _flatten(value)

    def rebuild(tensors: Sequence[Tensor]) -> T:
        built = make(tensors)
        assert isinstance(built, kind), "rebuilding keeps the type"
        return built

    return tensors, rebuild


def _flatten(value: object) -> tuple[list[Tensor], Rebuild[object]]:
    if isinstance(value, Tensor):
        return [value], lambda tensors: tensors[0]
    if isinstance(value, dict):
        keys = tuple(value)
        return _join(list(value.values()), lambda parts: dict(zip(keys, parts, strict=True)))
    if isinstance(value, tuple):
        return _join(value, tuple)
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        parts = [getattr(value, field.name) for field in fields(value)]
        return _join(parts, lambda parts: kind(*parts))
    return [], lambda tensors: value


def _join(
    parts: Sequence[object], whole: Callable[[list[object]], object]
) -> tuple[list[Tensor], Rebuild[object]]:
    found = [_flatten(part) for part in parts]
    makers = [(len(tensors), make) for tensors, make in found]

    def rebuild(tensors: Sequence[Tensor]) -> object:
        rest = list(tensors)
        built = []
        for count, make in makers:
            built.append(make(rest[:count]))
            del rest[:count]
        return whole(built)

    return [tensor for tensors, _ in found for tensor in tensors], rebuild
