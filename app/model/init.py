"""Initial weights, identical for every parallel layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from app.config import ModelConfig
from app.plan.model.stage import NamedWeight
from app.plan.model.weight import Initial
from app.plan.sharding.blocks import ShardCoords

DECAY_RATES = 0.01, 16.0  # bounds of initial rates of decay


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


def _std(initial: Initial, model: ModelConfig) -> float:
    if initial is Initial.residual:
        return model.init_std / math.sqrt(2 * model.num_layers)
    return model.init_std


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
        draw, size = _normal, _std(weight.initial, model)
        if weight.initial is Initial.kaiming:
            draw, size = _uniform, 1 / math.sqrt(weight.shape[1])
        if weight.initial is Initial.log_uniform:
            draw = _log_uniform
        if weight.initial is Initial.ones:
            tensor.fill_(1.0)
        elif weight.initial is Initial.zeros:
            tensor.zero_()
        elif not weight.expert:
            generator = _generator(seed, named.name, tensor.device)
            draw(own, block.shape, held, size=size, generator=generator)
        else:
            for number, expert in enumerate(own, start=block.start[0]):
                generator = _generator(seed, f"{named.name}.{number}", tensor.device)
                draw(expert, block.shape[1:], held[1:], size=size, generator=generator)


def _normal(
    own: Tensor,
    shape: Sequence[int],
    held: tuple[slice, ...],
    size: float,
    generator: torch.Generator,
) -> None:
    values = torch.empty(shape, dtype=torch.float32, device=own.device)
    own.copy_(values.normal_(0.0, size, generator=generator)[held])


def _uniform(
    own: Tensor,
    shape: Sequence[int],
    held: tuple[slice, ...],
    size: float,
    generator: torch.Generator,
) -> None:
    values = torch.empty(shape, dtype=torch.float32, device=own.device)
    own.copy_(values.uniform_(-size, size, generator=generator)[held])


def _log_uniform(
    own: Tensor,
    shape: Sequence[int],
    held: tuple[slice, ...],
    size: float,
    generator: torch.Generator,
) -> None:
    values = torch.empty(shape, dtype=torch.float32, device=own.device)
    own.copy_(values.uniform_(*DECAY_RATES, generator=generator).log_()[held])
