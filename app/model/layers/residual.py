"""Residual connection: the sum of hidden states and an output of a part of a layer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from app.config import ModelConfig

Add = Callable[[Tensor, Tensor], Tensor]


def residual_sum(model: ModelConfig) -> Add:
    """Return the function that adds an output to hidden states, scaled if the model scales it."""
    scale = model.residual_scale
    # one kernel, which saves nothing; only backward has another one, for the output's gradient
    return operator.add if scale is None or scale == 1 else partial(torch.add, alpha=scale)
