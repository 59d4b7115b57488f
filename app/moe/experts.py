"""The experts of a layer as two grouped matrix products: one launch for all experts, group sizes read on the device.

Shapes: R rows grouped by expert · E experts · D width · F hidden width of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_swiglu(rows_RD: Tensor, w1_ED2F: Tensor, w2_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Row r of expert e becomes (silu(r·w1ₑ[:, :F]) · (r·w1ₑ[:, F:]))·w2ₑ: [R, D] (SwiGLU, arXiv 2002.05202).

    Expert e owns rows ends[e-1] to ends[e] (int32, on the rows' device). Rows from ends[-1] on are uninitialised in the
    result and in the gradient. fp32, bf16 and fp16; D·itemsize and F·itemsize must be multiples of 16 bytes (RuntimeError).
    """
    gate_RF, up_RF = _grouped_linear(rows_RD, w1_ED2F, ends_E).chunk(2, dim=-1)
    return _grouped_linear(F.silu(gate_RF) * up_RF, w2_EFD, ends_E)


def _grouped_linear(rows_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    out_RO = F.grouped_mm(rows_RI, weight_EIO, offs=ends_E)
    if out_RO.requires_grad:
        out_RO.register_hook(torch.Tensor.contiguous)  # its backward refuses expanded gradients, such as a sum's
    return out_RO
