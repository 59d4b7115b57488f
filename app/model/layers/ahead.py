"""What a layer of multi-token prediction has around it (`app.model.ahead`).

Shapes: B sequences, s tokens per sequence of this rank, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from app.config import ModelConfig
from app.model.layers.layer_groups import ALONE, LayerGroups
from app.model.layers.linear import ColumnParallelLinear
from app.model.layers.norms import norm_of_hidden
from app.model.layers.weight_grads import WeightGradSink
from app.plan.model.layer import AheadWeights


class Ahead(nn.Module):
    """Inputs and output of a layer of multi-token prediction: norms and a projection before it, a
    norm behind.
    """

    def __init__(self, model: ModelConfig, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__()
        self.embedding_norm = norm_of_hidden(model)
        self.hidden_norm = norm_of_hidden(model)
        self.proj = ColumnParallelLinear(AheadWeights.of(model).proj, layer_groups)
        self.norm = norm_of_hidden(model)

    def forward(self, h_BsD: Tensor, e_BsD: Tensor, sink: WeightGradSink | None) -> Tensor:
        """Return hidden states for the layer: B × s × D."""
        normed = self.embedding_norm(e_BsD, sink), self.hidden_norm(h_BsD, sink)
        return self.proj.forward(torch.cat(normed, dim=-1), sink)
