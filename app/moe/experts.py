"""The experts of a layer as two grouped products, whose group sizes are read on the device.

Shapes: R rows grouped by expert · E experts · D width · F hidden width of an expert.
"""

from __future__ import annotations

from torch import Tensor, nn

from app.choices import Recompute
from app.model.layers import swiglu
from app.model.recompute import Recomputation
from app.model.weight_grads import WeightGradSink, grouped_linear


def grouped_swiglu(
    rows_RD: Tensor,
    w1_ED2F: nn.Parameter,
    w2_EFD: nn.Parameter,
    ends_E: Tensor,
    sink: WeightGradSink | None = None,
    recompute: Recomputation | None = None,
) -> Tensor:
    """Row r of expert e: (silu(r·w1ₑ[:, :F]) · (r·w1ₑ[:, F:]))·w2ₑ, [R, D] (arXiv 2002.05202).

    Expert e owns rows ends[e-1] to ends[e] (int32, on the rows' device). Rows from ends[-1] on are
    uninitialised in the result and in the gradient. `recompute` may have backward compute the
    activation again. fp32, bf16 and fp16; D·itemsize and F·itemsize must be multiples of 16 bytes
    (RuntimeError).
    """
    both_R2F = grouped_linear(rows_RD, w1_ED2F, ends_E, sink=sink)
    if recompute is None:
        act_RF = swiglu(both_R2F)
    else:
        act_RF = recompute.checkpoint_and_discard(Recompute.experts_act, swiglu, both_R2F)
    return grouped_linear(act_RF, w2_EFD, ends_E, sink=sink)
