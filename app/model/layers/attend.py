"""Softmax attention of queries to keys and values on one rank: interface, and torch's kernels.

Shapes: as in `app.model.attention.modules`; S queries here.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# backends whose backward can add in a fixed order
DETERMINISTIC_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Attend(Protocol):
    """Implementation of softmax attention."""

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        *,
        mask_B1SK: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """Attend with N query heads to G key/value heads, masked or causal; returns B × S × N × H.

        Causal queries are the last S of the K tokens. `scale`: factor on the scores; None means 1 /
        √H.
        """


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """torch's kernels (`Attend`).

    The fastest one on a GPU (cuDNN's) accumulates the gradient of the queries with atomics, so that
    two equal runs drift apart, and torch offers no deterministic variant. `deterministic` restricts
    torch to kernels that can add in a fixed order.
    """

    deterministic: bool = True

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        *,
        mask_B1SK: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """See `Attend`."""
        q_BNSH, k_BGKH, v_BGKH = (heads.transpose(1, 2) for heads in (q_BSNH, k_BKGH, v_BKGH))
        square = q_BNSH.shape[2] == k_BGKH.shape[2]
        gqa = q_BNSH.shape[1] != k_BGKH.shape[1]
        causal = square and mask_B1SK is None
        mask = mask_B1SK
        if mask is None and not square:
            mask = _last_rows(q_BNSH.shape[2], k_BGKH.shape[2])
        ordered = self.deterministic and q_BNSH.is_cuda
        with sdpa_kernel(DETERMINISTIC_BACKENDS) if ordered else nullcontext():
            out = F.scaled_dot_product_attention(
                q_BNSH,
                k_BGKH,
                v_BGKH,
                attn_mask=mask,
                is_causal=causal,
                scale=scale,
                enable_gqa=gqa,
            )
        if ordered and out.grad_fn is not None:
            # The switch is global and would slow other operations, so it is on only while this
            # node runs.
            before = torch.are_deterministic_algorithms_enabled()
            out.grad_fn.register_prehook(lambda grads: torch.use_deterministic_algorithms(True))
            out.grad_fn.register_hook(
                lambda grad_inputs, grad_outputs: torch.use_deterministic_algorithms(before)
            )
        return out.transpose(1, 2)


BY_TORCH = TorchAttention()  # in a fixed order


def _last_rows(queries: int, keys: int) -> Tensor:
    """Return the bias of causal queries that are the last of the keys; it is never materialised."""
    # brings torch's compiler along, two seconds few runs need
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(queries, keys)
