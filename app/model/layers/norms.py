"""Norms over hidden states and heads, by kind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.choices import NormKind, Recompute
from app.config import ModelConfig
from app.kernels.common import usable
from app.kernels.rms_norm import rms_norm, rms_norm_beside
from app.model.layers.layers import RMSNorm
from app.model.layers.recompute import Recomputation
from app.model.layers.weight_grads import WeightGradSink
from app.plan.model.norm import NormWeights


class PlusOneNorm(RMSNorm):
    """x / rms(x) · (1 + weight), computed in fp32 (Gemma); autograd takes the weight's gradient."""

    @property
    def scale(self) -> Tensor:
        """Return 1 + weight, in fp32 at least."""
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def forward(self, x: Tensor, sink: WeightGradSink | None = None) -> Tensor:
        """See `RMSNorm`."""
        if usable(x, self.weight):
            return rms_norm(x, self.scale, self.eps)
        scale = self.scale
        return F.rms_norm(x.to(scale.dtype), scale.shape, scale, self.eps).to(x.dtype)

    def beside(
        self, x: Tensor, recompute: Recomputation, sink: WeightGradSink | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `RMSNorm`."""
        if usable(x, self.weight):
            beside, out = rms_norm_beside(x, self.scale, self.eps)
        else:
            beside, out = x, self(x)
        if recompute.recomputes(Recompute.norm):
            recompute.discard_output(Recompute.norm, out, self, x)
        return beside, out


class LayerNorm(RMSNorm):
    """(x − mean) / deviation · weight by torch, which computes in fp32 (Ba et al. 2016)."""

    def forward(self, x: Tensor, sink: WeightGradSink | None = None) -> Tensor:
        """See `RMSNorm`."""
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)

    def beside(
        self, x: Tensor, recompute: Recomputation, sink: WeightGradSink | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `RMSNorm`."""
        out = self(x)
        if recompute.recomputes(Recompute.norm):
            recompute.discard_output(Recompute.norm, out, self, x)
        return x, out


class BiasedLayerNorm(LayerNorm):
    """LayerNorm with a bias."""

    def __init__(self, weights: NormWeights, eps: float) -> None:
        super().__init__(weights, eps)
        assert weights.bias is not None
        self.bias = nn.Parameter(torch.empty(weights.bias.shape))

    def forward(self, x: Tensor, sink: WeightGradSink | None = None) -> Tensor:
        """See `RMSNorm`."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class PlusOneLayerNorm(BiasedLayerNorm):
    """LayerNorm with a bias, scaled by 1 + weight (Nemotron)."""

    def forward(self, x: Tensor, sink: WeightGradSink | None = None) -> Tensor:
        """See `RMSNorm`."""
        return F.layer_norm(x, self.weight.shape, 1 + self.weight, self.bias, self.eps)


NORMS = {
    NormKind.rms: RMSNorm,
    NormKind.rms_plus_one: PlusOneNorm,
    NormKind.layer: LayerNorm,
    NormKind.layer_bias: BiasedLayerNorm,
    NormKind.layer_plus_one: PlusOneLayerNorm,
}


def norm_of_hidden(model: ModelConfig) -> RMSNorm:
    """Build a norm over hidden states, of the kind that the model has."""
    return NORMS[model.norm](NormWeights.of_hidden(model), model.norm_eps)
