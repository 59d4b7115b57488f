"""State of a layer with linear attention: what it needs of all tokens before, of fixed size.

Shapes: as in `app.model.decoding.layer_caches` and `app.model.attention.delta_rule`; Z = W − 1
tokens that the convolution sees before the next one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from app.model.attention.delta_rule import one_token, short_convolution, with_state
from app.model.attention.linear import LinearAttention, LinearHeads
from app.model.decoding.layer_caches import CacheSizes, NextToken
from app.model.layers.layers import Context


class RecurrentCache:
    """State of a gated delta net and the last inputs of its convolution, for this rank's heads."""

    def __init__(self, attn: LinearAttention, sizes: CacheSizes) -> None:
        self.attn = attn
        self.slots = sizes.places  # tokens that it stands for; a state never fills
        held = min(1, sizes.places)  # without places it keeps nothing
        linear = attn.linear
        widths = linear.key_head_dim, linear.value_head_dim
        self.state_BHKV = torch.zeros(
            held * sizes.sequences,
            attn.value_heads,
            *widths,
            dtype=torch.float32,
            device=sizes.device,
        )
        self.before_BZF = sizes.zeros(held * (linear.conv_width - 1), len(attn.conv))

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.state_BHKV.nbytes + self.before_BZF.nbytes

    def prompt(self, x_BsD: Tensor, context: Context, length_B: Tensor) -> Tensor:
        """See `LayerCache`."""
        heads = self._heads(x_BsD)
        q, k, v = self.attn.split(short_convolution(heads.channels, self.attn.conv, None))
        place_P = torch.arange(v.shape[1], device=v.device)
        padding_BP1 = (place_P >= length_B[:, None])[..., None]
        # padding neither writes nor forgets
        g, beta = (each.masked_fill(padding_BP1, 0) for each in (heads.g, heads.beta))
        out, state_BHKV = with_state(q, k, v, g_BSH=g, beta_BSH=beta)
        if self.slots:
            self.state_BHKV.copy_(state_BHKV)
            self._keep(heads.channels, length_B)
        return self.attn.w_out.forward(self.attn.gated(out, heads.gate))

    def step(self, x_1tD: Tensor, context: Context, following: NextToken) -> Tensor:
        """See `LayerCache`."""
        heads = self._heads(x_1tD)
        gate, channels, g, beta = (
            following.own(each) for each in (heads.gate, heads.channels, heads.g, heads.beta)
        )
        if len(channels) == len(self.state_BHKV):
            out = self._next(channels, g, beta)
        else:  # the next tokens of one sequence
            each = zip(channels.split(1), g.split(1), beta.split(1), strict=True)
            out = torch.cat([self._next(*row) for row in each])
        return self.attn.w_out.forward(
            following.as_rows(self.attn.gated(out, gate), heads.channels)
        )

    def _heads(self, x: Tensor) -> LinearHeads:
        return self.attn.heads(self.attn.w_in.forward(x), self.attn.w_beta.forward(x))

    def _next(self, channels_BF: Tensor, g_BH: Tensor, beta_BH: Tensor) -> Tensor:
        """Return the outputs of the next token of each sequence, B × H × V."""
        seen_BWF = torch.cat((self.before_BZF, channels_BF[:, None]), dim=1)
        self.before_BZF.copy_(seen_BWF[:, 1:])
        convolved_BF = short_convolution(seen_BWF, self.attn.conv, None)[:, -1]
        q, k, v = self.attn.split(convolved_BF)
        return one_token(q, k, v, g_BH=g_BH, beta_BH=beta_BH, state_BHKV=self.state_BHKV)

    def _keep(self, channels_BPF: Tensor, length_B: Tensor) -> None:
        """Keep the last inputs of the convolution; there are zeros before the first token."""
        count = self.before_BZF.shape[1]
        padded = F.pad(channels_BPF, (0, 0, count, 0))
        place_BZ = length_B[:, None] + torch.arange(count, device=length_B.device)
        sequence_B1 = torch.arange(len(length_B), device=length_B.device)[:, None]
        self.before_BZF.copy_(padded[sequence_B1, place_BZ])
