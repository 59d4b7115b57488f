"""Initial weights, the same for every parallel layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from app.config import ModelConfig


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


def _std(leaf: str, model: ModelConfig) -> float:
    return model.init_std / math.sqrt(2 * model.num_layers) if leaf in ("wo", "w_down") else model.init_std


@torch.no_grad()
def init_weights(named: Iterable[tuple[str, Tensor, int | None]], model: ModelConfig, seed: int) -> None:
    """Fill materialised parameters in place; each entry is (global name, tensor, first global expert or None).

    | parameter | distribution |
    |---|---|
    | norm weights (1-D `weight`) | 1 |
    | `wo`, `w_down`: what writes to the residual stream | N(0, init_std / √(2·num_layers)) (GPT-2) |
    | everything else: embedding, head, `wqkv`, `w_up`, router, gate | N(0, init_std) |

    Every parameter, and every expert of a stacked one, has its own generator seeded by (seed, global name), so
    that values depend neither on the order of creation nor on which rank holds them.
    """
    for name, tensor, first_expert in named:
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "weight" and tensor.dim() == 1:
            tensor.fill_(1.0)
        elif first_expert is None:
            _normal(tensor, _std(leaf, model), _generator(seed, name, tensor.device))
        else:
            for offset, expert in enumerate(tensor):
                _normal(expert, _std(leaf, model), _generator(seed, f"{name}.{first_expert + offset}", tensor.device))


def _normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    values = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    tensor.copy_(values.normal_(0.0, std, generator=generator))
