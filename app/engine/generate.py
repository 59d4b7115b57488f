"""A short sample from the model, to look at: every rank generates the same tokens.

Shapes: S tokens so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.engine.build import Engine

TEMPERATURE = 0.7


@torch.no_grad()
def sample_tokens(engine: Engine, prompt: list[int], count: int, window: int, vocab: int, seed: int) -> list[int]:
    """`count` tokens that continue `prompt`, drawn at a fixed temperature from the last `window` tokens' prediction.

    Only the first `vocab` ids are drawn: a padded embedding has more rows than the tokenizer has ids.
    """
    (chunk,) = engine.chunks
    engine.optimizer.gather_params(0)
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        recent_1S = torch.tensor([tokens[-window:]], device=engine.device)
        positions_1S = torch.arange(recent_1S.shape[1], device=engine.device)[None]
        logits_V = chunk(recent_1S, chunk.context(positions_1S, None)).x[0, -1, :vocab]
        tokens.append(_draw(logits_V, generator))
    return tokens[len(prompt) :]


def _draw(logits_V: Tensor, generator: torch.Generator) -> int:
    probs_V = (logits_V.float().cpu() / TEMPERATURE).softmax(-1)
    return int(torch.multinomial(probs_V, 1, generator=generator))
