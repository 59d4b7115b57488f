"""What attention remembers of a layer: static memory for a batch of sequences.

Sequences begin at place 0 and are filled up at their ends: nothing looks at what comes later, and a
sequence's next tokens overwrite its filling before they look at it. So prompts of different lengths
need no mask in front, and each its own number of places behind.

A rank has whole sequences, also where several share one in training (context parallelism).

Shapes: B sequences, P tokens of the longest prompt, M places of the memory, T rows of a step (B of
them, and so many more that tensor-parallel ranks divide them), D hidden; G key/value heads of this
rank with Q query heads each, N = G·Q, H head width; L width of the latent of keys and values, R of
the rotary key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.model.attention.modules import Attention, LatentAttention
from app.model.layers import Context
from app.model.tensor_parallel import gather_tokens


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Of the memory of every layer."""

    sequences: int  # B
    places: int  # M; 0: nothing is remembered
    dtype: torch.dtype
    device: torch.device

    def zeros(self, *shape: int) -> Tensor:
        """Memory of B × …: zeros, since a masked NaN would still be NaN."""
        return torch.zeros(self.sequences, *shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class NextToken:
    """Where the next token of every sequence belongs: found out once for all layers."""

    sequence_B: Tensor  # 0 to B - 1, int64, on the device
    place_B: Tensor  # int64, on the device
    bias_B11M: Tensor  # 0 for the places that it looks at, -∞ for others

    @classmethod
    def at(cls, place_B: Tensor, sizes: CacheSizes) -> NextToken:
        """Behind all tokens before it."""
        later_BM = torch.arange(sizes.places, device=place_B.device) > place_B[:, None]
        bias_BM = torch.zeros(later_BM.shape, dtype=sizes.dtype, device=place_B.device)
        bias_BM.masked_fill_(later_BM, -torch.inf)
        sequence_B = torch.arange(len(place_B), device=place_B.device)
        return cls(sequence_B, place_B, bias_BM[:, None, None])

    def put(self, memory_BGMH: Tensor, value_BGH: Tensor) -> None:
        """Remember one token of every sequence."""
        memory_BGMH[self.sequence_B, :, self.place_B] = value_BGH

    def look(self, q_BGQH: Tensor, k_BGMH: Tensor, v_BGMH: Tensor, scale: float | None) -> Tensor:
        """Attention of the queries of one token, of which those with one key/value head stand one
        below the other: B × G × Q × H.
        """
        return F.scaled_dot_product_attention(
            q_BGQH, k_BGMH, v_BGMH, attn_mask=self.bias_B11M, scale=scale
        )

    def own(self, rows_1TF: Tensor) -> Tensor:
        """The tokens among the rows of a step: B × F."""
        return rows_1TF[0, : len(self.place_B)]

    def as_rows(self, out_BF: Tensor, rows_1TF: Tensor) -> Tensor:
        """Tokens as rows of a step, as many as these are: 1 × T × F."""
        lacking = rows_1TF.shape[1] - len(out_BF)
        return (F.pad(out_BF, (0, 0, 0, lacking)) if lacking else out_BF)[None]


class LayerCache(Protocol):
    """The attention of one layer, with a memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""

    def prompt(self, x_BsD: Tensor, context: Context) -> Tensor:
        """Attention of prompts to themselves, which it remembers: B × s × D -> B × s × D,
        s = P / tp; no residual.
        """

    def step(self, x_1tD: Tensor, context: Context, following: NextToken) -> Tensor:
        """Attention of one token per sequence to all before it: 1 × t × D -> 1 × t × D, t = T / tp;
        no residual.
        """


class HeadsCache:
    """Keys and values of grouped-query attention, of this rank's heads."""

    def __init__(self, attn: Attention, sizes: CacheSizes) -> None:
        self.attn = attn
        self.k_BGMH = sizes.zeros(attn.num_kv_heads, sizes.places, attn.width)
        self.v_BGMH = torch.zeros_like(self.k_BGMH)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.k_BGMH.nbytes + self.v_BGMH.nbytes

    def prompt(self, x_BsD: Tensor, context: Context) -> Tensor:
        """See `LayerCache`."""
        q_BPNH, k_BPGH, v_BPGH = self.attn.heads(x_BsD, context)
        if self.k_BGMH.shape[2]:
            self.k_BGMH[:, :, : k_BPGH.shape[1]] = k_BPGH.transpose(1, 2)
            self.v_BGMH[:, :, : v_BPGH.shape[1]] = v_BPGH.transpose(1, 2)
        out_BPNH = context.attend(q_BPNH, k_BPGH, v_BPGH, mask_B1SK=None, scale=self.attn.scale)
        return self.attn.wo.forward(out_BPNH.flatten(2))

    def step(self, x_1tD: Tensor, context: Context, following: NextToken) -> Tensor:
        """See `LayerCache`."""
        q_1TNH, k_1TGH, v_1TGH = self.attn.heads(x_1tD, context)
        following.put(self.k_BGMH, following.own(k_1TGH))
        following.put(self.v_BGMH, following.own(v_1TGH))
        q_BGQH = following.own(q_1TNH).unflatten(1, (self.attn.num_kv_heads, -1))
        out_BGQH = following.look(q_BGQH, self.k_BGMH, self.v_BGMH, self.attn.scale)
        return self.attn.wo.forward(following.as_rows(out_BGQH.flatten(1), q_1TNH))


class LatentCache:
    """The latent and the rotary key of multi-head latent attention, the same on all ranks.

    Prompts attend with whole heads, as in training. A step does not: the part of `kv_b` that makes
    a head's keys is multiplied with its query instead, and the part that makes values with what it
    has found (DeepSeek-V2, arXiv 2405.04434, section 2.1.2), so that all heads share one key, of
    which the latent is a part, and one value, the latent.
    """

    def __init__(self, attn: LatentAttention, sizes: CacheSizes) -> None:
        self.attn = attn
        mla = attn.mla
        self.both_B1MF = sizes.zeros(1, sizes.places, mla.kv_lora_rank + mla.qk_rope_head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.both_B1MF.nbytes

    def prompt(self, x_BsD: Tensor, context: Context) -> Tensor:
        """See `LayerCache`."""
        attn = self.attn
        q, latent_BsL, key_BPR = attn.projected(x_BsD, context)
        if self.both_B1MF.shape[2]:
            both_BPF = self._both(latent_BsL, key_BPR, context)
            self.both_B1MF[:, 0, : both_BPF.shape[1]] = both_BPF
        kv = attn.kv_b.forward(latent_BsL)
        out_BPNH = context.attend(
            *attn.heads(q, kv, key_BPR, context),
            mask_B1SK=None,
            scale=attn.scale,
        )
        return attn.wo.forward(out_BPNH[..., : attn.mla.v_head_dim].flatten(2))

    def step(self, x_1tD: Tensor, context: Context, following: NextToken) -> Tensor:
        """See `LayerCache`."""
        attn, mla = self.attn, self.attn.mla
        q, latent_1tL, key_1TR = attn.projected(x_1tD, context)
        both_1TF = self._both(latent_1tL, key_1TR, context)
        following.put(self.both_B1MF, following.own(both_1TF)[:, None])
        makes_NFL = attn.kv_b.weight.unflatten(0, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        keys_NCL, values_NVL = makes_NFL.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=1)
        plain, rotated = (following.own(part) for part in attn.queries(q, context))
        q_BNF = torch.cat((torch.einsum("bnc,ncl->bnl", plain, keys_NCL), rotated), dim=-1)
        latent_B1ML = self.both_B1MF[..., : mla.kv_lora_rank]
        found_BNL = following.look(q_BNF[:, None], self.both_B1MF, latent_B1ML, self.scale)[:, 0]
        out_BNV = torch.einsum("bnl,nvl->bnv", found_BNL, values_NVL)
        return attn.wo.forward(following.as_rows(out_BNV.flatten(1), q))

    @property
    def scale(self) -> float:
        """On scores: that of whole heads, whatever the width of what is multiplied."""
        return self.attn.mla.key_width**-0.5 if self.attn.scale is None else self.attn.scale

    def _both(self, latent_BsL: Tensor, key_BPR: Tensor, context: Context) -> Tensor:
        """The latent of all tokens, and the rotary key rotated: B × P × (L + R)."""
        latent_BPL = gather_tokens(latent_BsL, self.attn.layer_groups.tp)
        key_BP1R = self.attn.shared_key(key_BPR, context)
        return torch.cat((latent_BPL, key_BP1R[:, :, 0]), dim=-1)


def layer_cache(attn: nn.Module, sizes: CacheSizes) -> LayerCache:
    """The memory for an attention, of whatever kind."""
    match attn:
        case Attention():
            return HeadsCache(attn, sizes)
        case LatentAttention():
            return LatentCache(attn, sizes)
    raise AssertionError(f"{type(attn).__name__} has no memory")
