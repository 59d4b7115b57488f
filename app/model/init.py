"""Initial weights, the same for every parallel layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from app.config import ModelConfig
from app.plan.sharding.blocks import EXPERTS
from app.plan.sharding.reshard import Block


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


def _std(leaf: str, model: ModelConfig) -> float:
    if leaf in ("wo", "w_down"):
        return model.init_std / math.sqrt(2 * model.num_layers)
    return model.init_std


@torch.no_grad()
def init_weights(named: Iterable[tuple[str, Tensor, Block]], model: ModelConfig, seed: int) -> None:
    """Fill materialised parameters in place; entries are (global name, tensor, block of the whole).

    | parameter | distribution |
    |---|---|
    | norm weights (1-D `weight`) | 1 |
    | `wo`, `w_down`: what writes to the residual stream | N(0, init_std / √(2·num_layers)) (GPT-2)
    |
    | everything else: embedding, head, `wqkv`, `w_up`, router, gate | N(0, init_std) |

    Every parameter, and every expert of a stacked one, has its own generator seeded by (seed,
    global name), so that values depend neither on the order of creation nor on which rank holds
    them. A rank that holds a part draws the whole and keeps its part.
    """
    for name, tensor, block in named:
        leaf = name.rsplit(".", 1)[-1]
        own = tensor.view(block.sizes)
        held = tuple(map(slice, block.start, block.stop))
        if leaf == "weight" and tensor.dim() == 1:
            tensor.fill_(1.0)
        elif EXPERTS not in name:
            _normal(
                own,
                block.shape,
                held,
                std=_std(leaf, model),
                generator=_generator(seed, name, tensor.device),
            )
        else:
            for number, expert in enumerate(own, start=block.start[0]):
                generator = _generator(seed, f"{name}.{number}", tensor.device)
                _normal(
                    expert, block.shape[1:], held[1:], std=_std(leaf, model), generator=generator
                )


def _normal(
    own: Tensor,
    shape: Sequence[int],
    held: tuple[slice, ...],
    std: float,
    generator: torch.Generator,
) -> None:
    values = torch.empty(shape, dtype=torch.float32, device=own.device)
    own.copy_(values.normal_(0.0, std, generator=generator)[held])
