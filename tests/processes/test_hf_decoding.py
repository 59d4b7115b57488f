"""Greedy texts and strided perplexity equal those of Hugging Face `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from app.engine.decoding.decoder import Decoder
from app.engine.decoding.scoring import perplexity, windows
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.runs import engine_of, make_run
from tests.tensors.hf_parity import CASES
from tests.tensors.hf_weights import converted, copy_weights, spread_weights
from tests.tensors.models import draw_tokens

NEW = 8
PROMPTS = ([7, 1, 80, 33, 2, 64, 19], [5, 5, 90], [42])
CONTEXT, STRIDE = 15, 6


def written(hf: nn.Module, prompt: list[int]) -> list[int]:
    """Return the tokens that transformers' `generate` adds, with a cache."""
    out = hf.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        pad_token_id=0,
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


@torch.no_grad()
def lost(hf: nn.Module, tokens: list[int]) -> float:
    """Mean nats per token as their guide on perplexity has it: of each window only what the ones
    before have not counted.
    """
    nats, counted, before = 0.0, 0, 0
    for begin in range(0, len(tokens), STRIDE):
        end = min(begin + CONTEXT, len(tokens))
        labels = torch.tensor(tokens[begin:end])
        labels[: len(labels) - (end - before)] = -100
        logits = hf(torch.tensor([tokens[begin:end]])).logits[0]
        nats += F.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100).item()
        counted += int((labels[1:] != -100).sum())
        before = end
        if end == len(tokens):
            break
    return nats / counted


def compared(rank: int, case: str) -> tuple[Any, Any]:
    build, theirs, ours = CASES[case]()
    hf = build(theirs).eval()
    hf.generation_config.eos_token_id = None
    spread_weights(hf)
    engine = engine_of(make_run(ours), rank)
    copy_weights(converted(hf.state_dict(), ours), engine.chunks[0])
    engine.chunks[0].rope_length = 0  # as in generation, not as in training
    decoder = Decoder(engine, len(PROMPTS), max(map(len, PROMPTS)) + NEW)
    drawn = [decoder.prompts(PROMPTS).argmax(-1)]
    while len(drawn) < NEW:
        drawn.append(decoder.step(drawn[-1]).argmax(-1))
    text = draw_tokens(ours, 45).tolist()
    known = perplexity(
        Decoder(engine, 2, 0), windows(text, CONTEXT, STRIDE), progress=lambda tokens: None
    )
    mine = torch.stack(drawn, dim=1).tolist(), known.per_token
    return mine, ([written(hf, prompt) for prompt in PROMPTS], lost(hf, text))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "case", chosen(CASES, ["llama-gqa", "ministral", "deepseek-v3", "llama-dynamic"])
)
def test_greedy_texts_and_perplexity(case: str):
    pytest.importorskip("transformers")
    (((texts, nats), (their_texts, their_nats)),) = run_distributed(compared, 1, case)
    assert texts == their_texts
    assert nats == pytest.approx(their_nats, rel=1e-5)
