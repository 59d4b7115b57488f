"""A short sample from the model, to look at: every rank generates the same tokens.

Shapes: S tokens so far.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.build import DTYPES, Engine

TEMPERATURE = 0.7


@torch.no_grad()
def sample_tokens(engine: Engine, prompt: list[int], count: int, window: int, vocab: int, seed: int) -> list[int]:
    """`count` tokens that continue `prompt`, drawn at a fixed temperature from the last `window` tokens' prediction.

    Only the first `vocab` ids are drawn: a padded embedding has more rows than the tokenizer has ids.
    """
    for chunk in range(len(engine.chunks)):
        engine.optimizer.gather_params(chunk)
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        recent_1S = torch.tensor([tokens[-window:]], device=engine.device)
        tokens.append(_draw(_last_logits(engine, recent_1S)[:vocab], generator))
    return tokens[len(prompt) :]


def _last_logits(engine: Engine, tokens_1S: Tensor) -> Tensor:
    """Logits of the token after the last, through all stages one after the other; on every pipeline rank."""
    groups, model, pipeline = engine.groups, engine.plan.run.model, engine.plan.stages.pipeline
    ranks, here = dist.get_process_group_ranks(groups.pp), groups.pp_rank
    positions_1S = torch.arange(tokens_1S.shape[1], device=engine.device)[None]
    x = tokens_1S
    for stage in range(pipeline.last + 1):
        owner, following = pipeline.rank(stage), pipeline.rank(min(stage + 1, pipeline.last))
        if owner == here:
            chunk = engine.chunks[stage // pipeline.pp]
            x = chunk(x, chunk.context(positions_1S, None)).x
        if following != owner and here == owner:
            dist.send(x, ranks[following], groups.pp)
        elif following != owner and here == following:
            x = torch.empty(
                *tokens_1S.shape, model.hidden_size, dtype=DTYPES[engine.plan.run.precision.params], device=engine.device
            )
            dist.recv(x, ranks[owner], groups.pp)
    last = pipeline.rank(pipeline.last)
    logits_V = x[0, -1].float().contiguous() if here == last else torch.empty(model.vocab_size, device=engine.device)
    if pipeline.pp > 1:
        dist.broadcast(logits_V, ranks[last], groups.pp)
    return logits_V


def _draw(logits_V: Tensor, generator: torch.Generator) -> int:
    probs_V = (logits_V.float().cpu() / TEMPERATURE).softmax(-1)
    return int(torch.multinomial(probs_V, 1, generator=generator))
