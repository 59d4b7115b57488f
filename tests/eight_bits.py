"""Triton's interpreter on numbers of eight bits, and rows of experts to quantise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn


def rounds_to_nearest() -> Iterator[None]:
    """The interpreter loses the carry of a rounded number (1.95 becomes 1), a GPU does not: it gets
    torch's rounding instead. For a fixture.
    """
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            interpreter = pytest.importorskip("triton.runtime.interpreter")
            usual = interpreter._convert_float

            def convert(given: Any, given_type: Any, wanted_type: Any, rounding: Any) -> Any:
                if wanted_type != interpreter.tl.float8e4nv:
                    return usual(given, given_type, wanted_type, rounding)
                wide = torch.from_numpy(np.ascontiguousarray(given).view(np.float32))
                return wide.to(E4M3).view(torch.uint8).numpy().reshape(given.shape)

            patch.setattr(interpreter, "_convert_float", convert)
        yield


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal numbers, NaN where there is NaN."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    return torch.equal(*(each.float().nan_to_num(nan=1e30) for each in (found, wanted)))
