"""Softmax attention of queries to keys and values on one rank: interface, and torch's kernels.

Shapes: as in `app.model.attention.modules`; S queries here, D documents per sequence at most.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

# backends whose backward can add in a fixed order
DETERMINISTIC_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True, slots=True)
class DocumentOffsets:
    """Documents of the sequences in one call of `Attend`: int32 offsets on the device.

    Document i has the queries `queries[i]` to `queries[i + 1]` of all B·S, counted sequence by
    sequence, and the keys `keys[i]` to `keys[i + 1]` of all B·K. Both tensors have B·D + 1 entries,
    whatever the documents: those that a sequence lacks are empty at its end. Documents before the
    first query of a sequence have keys only.
    """

    queries: Tensor
    keys: Tensor  # the same tensor if there are as many queries as keys

    @classmethod
    def of(cls, ends_BD: Tensor, queries: int, keys: int) -> DocumentOffsets:
        """Return them for the last S = `queries` of the first K = `keys` tokens of each sequence.

        ends_BD: int32, ascending; entries beyond the last document equal the sequence's length.
        """
        of_keys = _offsets(ends_BD.clamp(max=keys), keys)
        if queries == keys:
            return cls(of_keys, of_keys)
        of_queries = _offsets((ends_BD - (keys - queries)).clamp(0, queries), queries)
        return cls(of_queries, of_keys)

    def moved(self, name: str, move: Callable[[str, Tensor], Tensor]) -> DocumentOffsets:
        """Return a copy of which `move` has made each tensor, given a name and the tensor."""
        queries = move(f"{name}: queries", self.queries)
        if self.keys is self.queries:
            return DocumentOffsets(queries, queries)
        return DocumentOffsets(queries, move(f"{name}: keys", self.keys))


def _offsets(ends_BD: Tensor, length: int) -> Tensor:
    """Return the offsets of documents in sequences of `length` tokens, from their ends."""
    starts_B1 = torch.arange(
        0, len(ends_BD) * length, length, dtype=torch.int32, device=ends_BD.device
    )[:, None]
    return F.pad((ends_BD + starts_B1).flatten(), (1, 0))


class Attend(Protocol):
    """Implementation of softmax attention."""

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        *,
        window: int | None,
        documents: DocumentOffsets | None,
        scale: float | None,
    ) -> Tensor:
        """Attend causally with N query heads to G key/value heads; returns B × S × N × H.

        Queries are the last S of the K tokens of a sequence. A query sees itself and the `window` −
        1 tokens before it, None: all of them; of these only tokens of its document, if `documents`
        are given. `scale`: factor on the scores; None means 1 / √H.
        """


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """torch's kernels (`Attend`): cuDNN's or Flash for whole sequences, Flash for documents and
    windows, a stored mask where it has no kernel for these (`by_flash`).

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
        window: int | None,
        documents: DocumentOffsets | None,
        scale: float | None,
    ) -> Tensor:
        """See `Attend`."""
        queries, keys = q_BSNH.shape[1], k_BKGH.shape[1]
        if window is not None and window >= keys:
            window = None
        mask = None
        if documents is not None or window is not None:
            if q_BSNH.is_cuda and by_flash(q_BSNH.dtype, q_BSNH.shape[3]):
                heads = q_BSNH, k_BKGH, v_BKGH
                return self._by_flash(*heads, window=window, documents=documents, scale=scale)
            mask = visible(len(q_BSNH), queries, keys, q_BSNH.device, window, documents)
        elif queries != keys:
            mask = _last_rows(queries, keys)
        q_BNSH = q_BSNH.transpose(1, 2)
        k_BGKH = k_BKGH.transpose(1, 2)
        v_BGKH = v_BKGH.transpose(1, 2)
        ordered = self.deterministic and q_BNSH.is_cuda
        with sdpa_kernel(DETERMINISTIC_BACKENDS) if ordered else nullcontext():
            out = F.scaled_dot_product_attention(
                q_BNSH,
                k_BGKH,
                v_BGKH,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=q_BNSH.shape[1] != k_BGKH.shape[1],
            )
        return (_in_order(out) if ordered else out).transpose(1, 2)

    def _by_flash(
        self,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        *,
        window: int | None,
        documents: DocumentOffsets | None,
        scale: float | None,
    ) -> Tensor:
        """Attend by the kernels under `torch.nn.attention.varlen`, which takes no key/value heads
        of several query heads in torch 2.11, and loads torch's compiler.
        """
        heads = [q_BSNH, k_BKGH, v_BKGH]
        if documents is not None:
            heads = [each.flatten(0, 1) for each in heads]
        out: Tensor = torch.ops.aten._flash_attention_forward(
            *heads,
            None if documents is None else documents.queries,
            None if documents is None else documents.keys,
            q_BSNH.shape[1],
            k_BKGH.shape[1],
            0.0,  # dropout
            window is None,  # causal; a window says so by its right end
            False,  # nothing to debug
            scale=scale,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=0,
        )[0]
        if self.deterministic:
            out = _in_order(out)
        return out.unflatten(0, (len(q_BSNH), -1)) if documents is not None else out


def _in_order(out: Tensor) -> Tensor:
    """Make the backward of the operation that has returned this tensor add in a fixed order."""
    if out.grad_fn is not None:
        # The switch is global and would slow other operations, so it is on only while this node
        # runs.
        before = torch.are_deterministic_algorithms_enabled()
        out.grad_fn.register_prehook(lambda grads: torch.use_deterministic_algorithms(True))
        out.grad_fn.register_hook(
            lambda grad_inputs, grad_outputs: torch.use_deterministic_algorithms(before)
        )
    return out


def by_flash(dtype: torch.dtype, width: int) -> bool:
    """Return whether Flash attends to documents and windows on a GPU, with heads so wide."""
    return dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


BY_TORCH = TorchAttention()  # in a fixed order


def visible(
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
    window: int | None,
    documents: DocumentOffsets | None,
) -> Tensor:
    """Return where a query may attend to a key as `Attend` says: bool, B or 1 × 1 × S × K."""
    places_S1 = torch.arange(keys - queries, keys, device=device)[:, None]
    keys_K = torch.arange(keys, device=device)
    seen_B1SK = (keys_K <= places_S1)[None, None]
    if window is not None:
        seen_B1SK = seen_B1SK & (keys_K > places_S1 - window)
    if documents is None:
        return seen_B1SK

    def owners(offsets: Tensor, length: int) -> Tensor:
        tokens = torch.arange(batch * length, dtype=torch.int32, device=device)
        return torch.searchsorted(offsets[1:], tokens, right=True).view(batch, length)

    of_queries_BS, of_keys_BK = owners(documents.queries, queries), owners(documents.keys, keys)
    return seen_B1SK & (of_queries_BS[:, None, :, None] == of_keys_BK[:, None, None])


def _last_rows(queries: int, keys: int) -> Tensor:
    """Return the bias of causal queries that are the last of the keys; it is never materialised."""
    # brings torch's compiler along, two seconds few runs need
    from torch.nn.attention.bias import causal_lower_right

    with _disable_current_modes():  # torch cannot make one while a mode watches operations
        return causal_lower_right(queries, keys)
