"""Map the configuration's element types to torch's."""

from __future__ import annotations

import torch

from app.choices import Dtype

DTYPES = {
    Dtype.float32: torch.float32,
    Dtype.bfloat16: torch.bfloat16,
    Dtype.float16: torch.float16,
}
