"""Triton, where it is installed, and whether a kernel may take the place of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # torch for CPUs comes without it
    triton = tl = TensorDescriptor = None

__all__ = [  # Triton's names too: kernels have them from here
    "TensorDescriptor",
    "jit",
    "moves_tiles",
    "tl",
    "triton",
    "usable",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def jit(kernel: Callable[..., object]) -> Any:
    """A kernel that `[grid](...)` launches; the function itself where Triton is missing."""
    return kernel if triton is None else triton.jit(kernel)


def usable(*tensors: Tensor) -> bool:
    """Whether kernels take these tensors: Triton is there, and they lie on a GPU in `DTYPES`."""
    return triton is not None and all(
        tensor.is_cuda and tensor.dtype in DTYPES for tensor in tensors
    )


def moves_tiles(device: torch.device) -> bool:
    """Whether a GPU moves whole tiles of matrices by itself, as Hopper does (TMA)."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
