"""Triton if it is installed, and the checks that decide between a kernel and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # CPU builds of torch come without Triton
    triton = tl = TensorDescriptor = None

__all__ = [  # Triton's names too: kernels import them from here
    "TensorDescriptor",
    "jit",
    "moves_tiles",
    "tl",
    "triton",
    "usable",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def jit(kernel: Callable[..., object], **options: Any) -> Any:
    """Return a kernel launched by `[grid](...)`; the function itself if Triton is missing.

    options: of triton.jit.
    """
    return kernel if triton is None else triton.jit(kernel, **options)


def usable(*tensors: Tensor) -> bool:
    """Return whether Triton kernels support these tensors: Triton is installed, and they lie on a
    GPU in `DTYPES`.
    """
    return triton is not None and all(
        tensor.is_cuda and tensor.dtype in DTYPES for tensor in tensors
    )


def moves_tiles(device: torch.device) -> bool:
    """Return whether the GPU has TMA, which loads tiles of matrices in hardware (Hopper, newer)."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
