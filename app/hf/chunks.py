"""Load Hugging Face weights into a rank's model chunks and into its optimizer's parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from app.hf.pretrained import Pretrained
from app.hf.tables import router_bias
from app.model.chunk import Chunk
from app.moe.phases import Router
from app.optim.shard import ParamShard
from app.plan.model.stage import model_weights
from app.plan.sharding.blocks import ShardCoords


def fill_chunks(chunks: Iterable[Chunk], pretrained: Pretrained, coords: ShardCoords) -> None:
    """Fill this rank's parts of all weights, and the biases of its routers. Raises ConfigError."""
    for chunk in chunks:
        held = ((named, param) for named, param in chunk.weights() if not named.adapter)
        pretrained.fill(held, coords)
        for name, module in chunk.named_modules():
            if isinstance(module, Router):
                biases = router_bias(chunk.model, name)
                pretrained.fill(((weight, module.bias_E) for weight in biases), coords)


@torch.no_grad()
def fill_main_params(param_shards: Iterable[ParamShard], pretrained: Pretrained) -> None:
    """Fill the optimizer's fp32 main parameters from the files, if these are more precise than the
    model's parameters. Raises ConfigError.
    """
    weights = {each.name: each for each in model_weights(pretrained.model)}
    for owned in param_shards:
        named, held = weights[owned.spec.name], owned.spec.param.dtype
        if torch.promote_types(pretrained.dtype_of(named), held) != held:
            part = owned.start, owned.start + owned.main.numel()
            pretrained.fill_part(named, owned.spec.block, part, tensor=owned.main)
