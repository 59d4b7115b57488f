"""A short sample from the model, to look at: every rank generates the same tokens.

Shapes: S tokens so far, and so many more that they divide over context- and tensor-parallel ranks;
V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_reduce
from app.data.tokenizer import Tokenizer
from app.engine.build import Engine
from app.engine.dtypes import DTYPES
from app.engine.report.telling import telling
from app.model.context_parallel import own_tokens

TEMPERATURE = 0.7
SECONDS = 4.0  # that a sample may take


def sample_text(engine: Engine, tokenizer: Tokenizer, prompt: list[int], aloud: bool) -> str | None:
    """Text that continues a prompt; None where the run asks for none. All ranks call it.

    `aloud`: this rank says how far it has come, where that takes long.
    """
    run = engine.plan.run
    drawn: list[int] = []
    count = run.train.sample_tokens
    if not count:
        return None
    tokens = sample_tokens(
        engine,
        prompt,
        count,
        window=run.train.seq_len,
        vocab=tokenizer.vocab_size,
        seed=run.train.seed,
        seconds=SECONDS,
    )
    with telling("sampling", lambda: f"{len(drawn)} of {count} tokens", aloud=aloud):
        for token in tokens:
            drawn.append(token)
    return f"{tokenizer.decode(prompt)}▶{tokenizer.decode(drawn)}"


@torch.no_grad()
def sample_tokens(
    engine: Engine,
    prompt: list[int],
    count: int,
    *,
    window: int,
    vocab: int,
    seed: int,
    seconds: float = math.inf,
) -> Iterator[int]:
    """Tokens that continue `prompt`, drawn at a fixed temperature given the last `window` tokens.

    There are `count` of them, or fewer where that would take longer than some `seconds`: each costs
    a forward. Only the first `vocab` ids are drawn: a padded embedding has more rows than the
    tokenizer has ids.
    """
    until = time.monotonic() + seconds
    engine.make_parameters_whole()
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count and _in_time(engine, until):
        with engine.all_rows():
            logits_V = _last_logits(engine, tokens[-window:])
        tokens.append(_draw(logits_V[:vocab], generator))
        yield tokens[-1]


def _in_time(engine: Engine, until: float) -> bool:
    """Whether rank 0's clock is not past this; the same on every rank."""
    in_time = torch.tensor([time.monotonic() < until])
    dist.broadcast(in_time, src=0, group=engine.groups.host)
    return bool(in_time)


def _last_logits(engine: Engine, tokens: list[int]) -> Tensor:
    """Logits of the token after the last, through all stages one after the other; on every rank."""
    groups = engine.groups
    pipeline = engine.plan.stages.pipeline
    cp = groups.layout.cp
    tp = groups.layout.tp
    parts = (2 * cp if cp > 1 else 1) * tp
    # nothing looks at what comes later
    padded = torch.tensor(tokens + [0] * (-len(tokens) % parts), device=engine.device)
    own_S = own_tokens(len(padded), cp, groups.cp_rank, device=engine.device)
    x = padded[own_S][None]
    hidden_1sD = (1, len(own_S) // tp, engine.plan.run.model.hidden_size)
    ranks = dist.get_process_group_ranks(groups.pp)
    here = groups.pp_rank
    for stage in range(pipeline.last + 1):
        owner = pipeline.rank(stage)
        following = pipeline.rank(min(stage + 1, pipeline.last))
        if owner == here:
            chunk = engine.chunks[stage // pipeline.pp]
            x = chunk(x, chunk.context(own_S[None], None)).x
        if following != owner and here == owner:
            _exchange(dist.isend, x.contiguous(), ranks[following], group=groups.pp)
        elif following != owner and here == following:
            x = torch.empty(
                hidden_1sD, dtype=DTYPES[engine.plan.run.precision.params], device=engine.device
            )
            _exchange(dist.irecv, x, ranks[owner], group=groups.pp)
    return _of_place(engine, x, own_S, place=len(tokens) - 1)


def _exchange(
    operation: Callable[..., Any], tensor: Tensor, peer: int, *, group: dist.ProcessGroup
) -> None:
    # As a batch of one: NCCL makes a communicator for every two ranks, and warns of it, otherwise.
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)]):
        work.wait()


def _of_place(engine: Engine, x_1sD: Tensor, own_S: Tensor, place: int) -> Tensor:
    """Logits of one place of the sequence, from the last stage's output, on every rank."""
    groups = engine.groups
    pipeline = engine.plan.stages.pipeline
    run = engine.plan.run
    logits_V = torch.zeros(run.model.vocab_size, device=engine.device)
    if pipeline.rank(pipeline.last) == groups.pp_rank:
        columns_SV = engine.chunks[-1].logits(x_1sD)[0].float()
        found_V = (columns_SV * (own_S == place)[:, None]).sum(0)
        logits_V.view(groups.layout.tp, -1)[groups.coords.tp[0]] = found_V
    # every number is on one rank, and zero on the others
    for group in (groups.tp, groups.cp, groups.pp):
        all_reduce(logits_V, group)
    return logits_V


def _draw(logits_V: Tensor, generator: torch.Generator) -> int:
    probs_V = (logits_V.float().cpu() / TEMPERATURE).softmax(-1)
    return int(torch.multinomial(probs_V, 1, generator=generator))
