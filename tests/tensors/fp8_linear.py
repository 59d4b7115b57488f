"""Shared by test_fp8_linear.py and other tests."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def kept_bytes(compute: Callable[[], object]) -> int:
    found: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        found.append(saved.nbytes)
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        compute()
    return sum(found)
