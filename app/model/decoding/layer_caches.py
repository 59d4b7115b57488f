"""KV caches of a layer's attention: static memory for a batch of sequences.

Sequences begin at position 0 and are padded at their ends: causal attention never looks at the
padding, and a sequence's next tokens overwrite it before they could attend to it. Prompts of
different lengths therefore need no mask, and each continues at its own position.

A layer with a sliding window caches as many tokens as the window has, in a ring: the token at
position p is in slot p mod M, where it replaces the one that has just left the window.

A rank caches whole sequences, also if training shards them (context parallelism).

Shapes: B sequences, P tokens of the longest prompt, M slots of the cache, T rows of a step (B
of them, padded to a multiple of the tensor-parallel ranks), s = P / tp and t = T / tp of them
between matrices, D hidden; G key/value heads of this rank with Q query heads each, N = G·Q, H head
width; L width of the latent of keys and values, R of the rotary key, F = L + R; C width of a key
head without rotary positions, V of a value head, F = C + V in `makes_NFL`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.model.attention.modules import (
    Attention,
    AttentionWithSinks,
    GatedAttention,
    LatentAttention,
)
from app.model.attention.sinks import look_with_sinks
from app.model.attention.softcap import capped
from app.model.layers.layer_groups import gather_tokens
from app.model.layers.layers import Context
from app.model.lora import merged


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Sizes that the caches of all layers share."""

    sequences: int  # B
    places: int  # tokens of a sequence at most; 0 disables the cache
    dtype: torch.dtype
    device: torch.device
    length: int = 0  # tokens of a sequence at most, of which `places` may be padded

    def zeros(self, *shape: int) -> Tensor:
        """Allocate B × … zeros: uninitialised memory may hold NaN, which a mask would not
        remove.
        """
        return torch.zeros(self.sequences, *shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class NextToken:
    """Slot of the next token of every sequence, computed once for all caches of M slots.

    Of a single sequence there may be several next tokens, which take the place of B.
    """

    sequence_B: Tensor  # 0 to B - 1, or 0 for all; int64, on the device
    slot_B: Tensor  # int64, on the device
    bias_B11M: Tensor  # 0 for slots to attend to, -∞ for others

    @classmethod
    def at(cls, place_B: Tensor, slots: int, sizes: CacheSizes) -> NextToken:
        """Build it for tokens at these positions."""
        # a slot beyond the position of the token has not been written by its sequence
        empty_BM = torch.arange(slots, device=place_B.device) > place_B[:, None]
        bias_BM = torch.zeros(empty_BM.shape, dtype=sizes.dtype, device=place_B.device)
        bias_BM.masked_fill_(empty_BM, -torch.inf)
        sequence_B = torch.arange(len(place_B), device=place_B.device)
        if len(place_B) != sizes.sequences:
            assert sizes.sequences == 1, "several tokens are of one sequence"
            sequence_B = torch.zeros_like(place_B)
        return cls(sequence_B, place_B % slots, bias_BM[:, None, None])

    def put(self, memory_BGMH: Tensor, value_BGH: Tensor) -> None:
        """Write one token of every sequence to the cache."""
        memory_BGMH[self.sequence_B, :, self.slot_B] = value_BGH

    def look(self, q_BGQH: Tensor, k_BGMH: Tensor, v_BGMH: Tensor, scale: float | None) -> Tensor:
        """Attend with the queries of one token; queries that share a key/value head are rows of one
        matrix: B × G × Q × H.
        """
        k_BGMH, v_BGMH = (each.expand(len(q_BGQH), -1, -1, -1) for each in (k_BGMH, v_BGMH))
        return F.scaled_dot_product_attention(
            q_BGQH, k_BGMH, v_BGMH, attn_mask=self.bias_B11M, scale=scale
        )

    def own(self, rows_1TF: Tensor) -> Tensor:
        """Return the tokens among the rows of a step: B × F."""
        return rows_1TF[0, : len(self.slot_B)]

    def as_rows(self, out_BF: Tensor, rows_1TF: Tensor) -> Tensor:
        """Pad tokens to the rows of a step: 1 × T × F."""
        lacking = rows_1TF.shape[1] - len(out_BF)
        return (F.pad(out_BF, (0, 0, 0, lacking)) if lacking else out_BF)[None]


def put_prompts(memory_BGMH: Tensor, rows_BPGH: Tensor, length_B: Tensor) -> None:
    """Write prompts to an empty cache, of those longer than it the tokens that fit it.

    `length_B`: tokens of each prompt, int64, on the device; padding follows them.
    """
    slots, length = memory_BGMH.shape[2], rows_BPGH.shape[1]
    if length <= slots:
        memory_BGMH[:, :, :length] = rows_BPGH.transpose(1, 2)
        return
    # Slot m gets the last position p of a prompt with p mod M = m. A prompt shorter than the cache
    # has none for its last slots; what is written there is not seen (`NextToken.at`).
    last_B1 = length_B[:, None] - 1
    behind_BM = (last_B1 - torch.arange(slots, device=length_B.device)) % slots
    place_BM = (last_B1 - behind_BM).clamp(min=0)
    sequence_B1 = torch.arange(len(length_B), device=length_B.device)[:, None]
    memory_BGMH.copy_(rows_BPGH[sequence_B1, place_BM].transpose(1, 2))


class LayerCache(Protocol):
    """Attention of one layer with its KV cache."""

    @property
    def slots(self) -> int:
        """M: tokens of a sequence that the cache holds."""

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""

    def prompt(self, x_BsD: Tensor, context: Context, length_B: Tensor) -> Tensor:
        """Attend within prompts of these lengths and cache them: B × s × D -> B × s × D, s = P /
        tp, without the residual.
        """

    def step(self, x_1tD: Tensor, context: Context, following: NextToken) -> Tensor:
        """Attend with one token per sequence to all tokens before it: 1 × t × D -> 1 × t × D, t = T
        / tp, without the residual.
        """


class HeadsCache:
    """Cached keys and values of grouped-query attention, for this rank's heads."""

    def __init__(self, attn: Attention, sizes: CacheSizes) -> None:
        self.attn = attn
        self.slots = attn.spec.cached_tokens(sizes.places)
        self.k_BGMH = sizes.zeros(attn.num_kv_heads, self.slots, attn.spec.width)
        self.v_BGMH = torch.zeros_like(self.k_BGMH)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.k_BGMH.nbytes + self.v_BGMH.nbytes

    def prompt(self, x_BsD: Tensor, context: Context, length_B: Tensor) -> Tensor:
        """See `LayerCache`."""
        return self.attn.out(self._prompt(self.attn.heads(x_BsD, context), context, length_B))

    def step(self, x_1tD: Tensor, context: Context, following: NextToken) -> Tensor:
        """See `LayerCache`."""
        return self.attn.out(self._step(self.attn.heads(x_1tD, context), following))

    def _prompt(self, heads: Sequence[Tensor], context: Context, length_B: Tensor) -> Tensor:
        """Cache keys and values; return the heads' outputs: B × P × N·H."""
        spec = self.attn.spec
        q_BPNH, k_BPGH, v_BPGH = heads
        if self.slots:
            put_prompts(self.k_BGMH, k_BPGH, length_B)
            put_prompts(self.v_BGMH, v_BPGH, length_B)
        out_BPNH = context.attend(
            q_BPNH, k_BPGH, v_BPGH, window=spec.window, documents=None, scale=spec.scale
        )
        return out_BPNH.flatten(2)

    def _step(self, heads: Sequence[Tensor], following: NextToken) -> Tensor:
        """Cache a token; return the heads' outputs: 1 × T × N·H."""
        q_1TNH, k_1TGH, v_1TGH = heads
        following.put(self.k_BGMH, following.own(k_1TGH))
        following.put(self.v_BGMH, following.own(v_1TGH))
        q_BGQH = following.own(q_1TNH).unflatten(1, (self.attn.num_kv_heads, -1))
        out_BGQH = self.look(q_BGQH, following)
        return following.as_rows(out_BGQH.flatten(1), q_1TNH)

    def look(self, q_BGQH: Tensor, following: NextToken) -> Tensor:
        """Attend with the queries of one token: B × G × Q × H."""
        return following.look(q_BGQH, self.k_BGMH, self.v_BGMH, self.attn.spec.scale)


class GatedCache(HeadsCache):
    """`HeadsCache` of attention with a gate."""

    attn: GatedAttention

    def prompt(self, x_BsD: Tensor, context: Context, length_B: Tensor) -> Tensor:
        """See `LayerCache`."""
        *heads, gate = self.attn.gated_heads(x_BsD, context)
        return self.attn.out(self._prompt(heads, context, length_B) * gate)

    def step(self, x_1tD: Tensor, context: Context, following: NextToken) -> Tensor:
        """See `LayerCache`."""
        *heads, gate = self.attn.gated_heads(x_1tD, context)
        return self.attn.out(self._step(heads, following) * gate)


class CappedCache(HeadsCache):
    """`HeadsCache` of attention with capped scores."""

    def __init__(self, attn: Attention, sizes: CacheSizes, softcap: float) -> None:
        super().__init__(attn, sizes)
        self.softcap = softcap

    def look(self, q_BGQH: Tensor, following: NextToken) -> Tensor:
        """See `HeadsCache`."""
        spec = self.attn.spec
        scale = spec.width**-0.5 if spec.scale is None else spec.scale
        scores = (q_BGQH @ self.k_BGMH.transpose(-1, -2)).mul_(scale)
        probs = (capped(scores.float(), self.softcap) + following.bias_B11M).softmax(-1)
        return probs.to(q_BGQH.dtype) @ self.v_BGMH


class SinksCache(HeadsCache):
    """Cached keys and values of attention with sinks."""

    attn: AttentionWithSinks

    def prompt(self, x_BsD: Tensor, context: Context, length_B: Tensor) -> Tensor:
        """See `LayerCache`."""
        return super().prompt(x_BsD, self.attn.with_sinks(context), length_B)

    def look(self, q_BGQH: Tensor, following: NextToken) -> Tensor:
        """See `HeadsCache`."""
        spec = self.attn.spec
        return look_with_sinks(
            q_BGQH,
            self.k_BGMH,
            self.v_BGMH,
            bias=following.bias_B11M,
            sinks_N=self.attn.sinks,
            scale=spec.width**-0.5 if spec.scale is None else spec.scale,
        )


class LatentCache:
    """Cached latent and rotary key of multi-head latent attention, equal on all ranks.

    Prompts attend with complete heads, as in training. A step absorbs the up-projections instead
    (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): the part of `kv_b` that makes keys is multiplied
    into the query, and the part that makes values into the attention output, so that all heads
    share one key, which contains the latent, and one value, the latent.
    """

    def __init__(self, attn: LatentAttention, sizes: CacheSizes) -> None:
        self.attn = attn
        mla = attn.mla
        self.slots = attn.spec.cached_tokens(sizes.places)
        self.both_B1MF = sizes.zeros(1, self.slots, mla.kv_lora_rank + mla.qk_rope_head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.both_B1MF.nbytes

    def prompt(self, x_BsD: Tensor, context: Context, length_B: Tensor) -> Tensor:
        """See `LayerCache`."""
        attn = self.attn
        q, latent_BsL, key_BPR = attn.projected(x_BsD, context)
        if self.slots:
            both_BPF = self._both(latent_BsL, key_BPR, context)
            put_prompts(self.both_B1MF, both_BPF[:, :, None], length_B)
        kv = attn.kv_b.forward(latent_BsL)
        out_BPNH = context.attend(
            *attn.heads(q, kv, key_BPR, context),
            window=attn.spec.window,
            documents=None,
            scale=attn.spec.scale,
        )
        return attn.wo.forward(out_BPNH[..., : attn.mla.v_head_dim].flatten(2))

    def step(self, x_1tD: Tensor, context: Context, following: NextToken) -> Tensor:
        """See `LayerCache`."""
        attn, mla = self.attn, self.attn.mla
        q, latent_1tL, key_1TR = attn.projected(x_1tD, context)
        both_1TF = self._both(latent_1tL, key_1TR, context)
        following.put(self.both_B1MF, following.own(both_1TF)[:, None])
        makes_NFL = merged(attn.kv_b).unflatten(0, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        keys_NCL, values_NVL = makes_NFL.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=1)
        plain, rotated = (following.own(part) for part in attn.queries(q, context))
        q_BNF = torch.cat((torch.einsum("bnc,ncl->bnl", plain, keys_NCL), rotated), dim=-1)
        latent_B1ML = self.both_B1MF[..., : mla.kv_lora_rank]
        found_BNL = following.look(q_BNF[:, None], self.both_B1MF, latent_B1ML, self.scale)[:, 0]
        out_BNV = torch.einsum("bnl,nvl->bnv", found_BNL, values_NVL)
        return attn.wo.forward(following.as_rows(out_BNV.flatten(1), q))

    @property
    def scale(self) -> float:
        """Factor on the scores: that of complete heads, although absorbed heads are wider."""
        scale = self.attn.spec.scale
        return self.attn.mla.key_width**-0.5 if scale is None else scale

    def _both(self, latent_BsL: Tensor, key_BPR: Tensor, context: Context) -> Tensor:
        """Return the latent of all tokens and the rotated key: B × P × (L + R)."""
        latent_BPL = gather_tokens(latent_BsL, self.attn.layer_groups.tp)
        key_BP1R = self.attn.shared_key(key_BPR, context)
        return torch.cat((latent_BPL, key_BP1R[:, :, 0]), dim=-1)


def layer_cache(attn: nn.Module, sizes: CacheSizes) -> LayerCache:
    """Build the cache for an attention with keys and values."""
    match attn:
        case AttentionWithSinks():
            return SinksCache(attn, sizes)
        case GatedAttention():
            return GatedCache(attn, sizes)
        case Attention() if attn.spec.softcap is not None:
            return CappedCache(attn, sizes, attn.spec.softcap)
        case Attention():
            return HeadsCache(attn, sizes)
        case LatentAttention():
            return LatentCache(attn, sizes)
    raise AssertionError(f"{type(attn).__name__} has no KV cache")
