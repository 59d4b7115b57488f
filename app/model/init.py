"""Initial weights, identical for every parallel layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from app.config import ModelConfig
from app.plan.model.stage import NamedWeight
from app.plan.model.weight import Initial, Weight
from app.plan.sharding.blocks import ShardCoords

DECAY_RATES = 0.01, 16.0  # bounds of initial rates of decay
Fill = Callable[[Tensor, torch.Generator], Tensor]  # fills a tensor with random values, returns it


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


def _fill(weight: Weight, model: ModelConfig) -> Fill:
    """Return what draws the values of a weight."""
    std = model.init_std
    match weight.initial:
        case Initial.kaiming:
            bound = 1 / math.sqrt(weight.shape[1])
            return lambda values, generator: values.uniform_(-bound, bound, generator=generator)
        case Initial.log_uniform:
            low, high = DECAY_RATES
            return lambda values, generator: values.uniform_(low, high, generator=generator).log_()
        case Initial.residual:
            std /= math.sqrt(2 * model.num_layers)
    return lambda values, generator: values.normal_(0.0, std, generator=generator)


@torch.no_grad()
def init_weights(
    weights: Iterable[tuple[NamedWeight, Tensor]],
    coords: ShardCoords,
    model: ModelConfig,
    seed: int,
) -> None:
    """Fill this rank's weight shards in place, each as its `Initial` says.

    Every weight, and every expert of a stacked one, has its own generator seeded by (seed, global
    name), so that values depend neither on the order of creation nor on which rank holds them. A
    rank that holds a shard draws the whole weight and keeps its shard.
    """
    for named, tensor in weights:
        weight = named.weight
        block = coords.block(weight)
        own = tensor.view(block.sizes)
        held = tuple(map(slice, block.start, block.stop))
        fill = _fill(weight, model)
        if weight.initial is Initial.ones:
            tensor.fill_(1.0)
        elif weight.initial is Initial.zeros:
            tensor.zero_()
        elif not weight.expert:
            generator = _generator(seed, named.name, tensor.device)
            _draw(own, block.shape, held, fill=fill, generator=generator)
        else:
            for number, expert in enumerate(own, start=block.start[0]):
                generator = _generator(seed, f"{named.name}.{number}", tensor.device)
                _draw(expert, block.shape[1:], held[1:], fill=fill, generator=generator)


def _draw(
    own: Tensor,
    shape: Sequence[int],
    held: tuple[slice, ...],
    *,
    fill: Fill,
    generator: torch.Generator,
) -> None:
    """Draw a whole weight of `shape` and keep the part that this rank holds."""
    values = torch.empty(shape, dtype=torch.float32, device=own.device)
    own.copy_(fill(values, generator)[held])
