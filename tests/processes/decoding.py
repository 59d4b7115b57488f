"""Shared by test_decoding.py and other tests."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch

from app.choices import ActivationKind, BlockKind, CpComm, DispatcherKind, LayerType, NormKind
from app.config import LinearAttentionConfig, ModelConfig, ParallelConfig, Run
from app.engine.capture.recorder import Recorder
from app.engine.decoding.decoder import Decoder, Model
from app.engine.step.engine import Engine
from tests.distributed import run_distributed
from tests.parity import exact_engine, here
from tests.rounding import Values, numbered
from tests.runs import LATENT, TINY, TINY_MOE, make_run

FULL, SLIDING, LINEAR = LayerType
PROMPTS = ([5, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5])


STEPS = 6


PLACES = 13  # the longest prompt and all steps but the last fill them


def sharp(model: ModelConfig, **changes: Any) -> ModelConfig:
    """Far from uniform, so that rounding does not decide between tokens."""
    return dataclasses.replace(model, num_layers=4, init_std=0.3, **changes)


MODELS = {
    "moe": sharp(TINY),
    "dense": sharp(TINY, moe=None, qk_norm=True, tie_embeddings=True),
    "latent": sharp(LATENT),
    "plain queries": sharp(
        LATENT, yarn=None, moe=None, mla=dataclasses.replace(LATENT.mla, q_lora_rank=None)
    ),
    # caches that keep the last tokens of prompts and of what follows them, and others that do not
    "windows": sharp(TINY, moe=None, rotary_dim=4, sliding_window=4, layer_types=(SLIDING, FULL)),
    "sinks": sharp(
        TINY,
        moe=None,
        sinks=True,
        attn_out_bias=True,
        sliding_window=4,
        layer_types=(SLIDING, FULL),
    ),
    "scaled residuals": sharp(TINY, residual_scale=0.5, embedding_scale=3.0, logit_scale=2.0),
    "parallel norms": sharp(
        TINY,
        moe=None,
        block=BlockKind.parallel_norms,
        norm=NormKind.layer_bias,
        mlp_gate=False,
        activation=ActivationKind.gelu,
    ),
    "linear": sharp(
        TINY,
        moe=None,
        attention_gate=True,
        qk_norm=True,
        norm=NormKind.rms_plus_one,
        layer_types=(LINEAR, FULL),
        linear_attention=LinearAttentionConfig(2, 4, key_head_dim=8, value_head_dim=12),
    ),
    "latent windows": sharp(LATENT, moe=None, sliding_window=4, layer_types=(SLIDING, FULL)),
    "static": sharp(TINY, moe=dataclasses.replace(TINY_MOE, dispatcher=DispatcherKind.static)),
}


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "tp 2, two replicas": {"tp": 2, "dp": 2},
    "ep 2": {"ep": 2, "dp": 2},
    "tp 2 ep 2": {"tp": 2, "ep": 2, "etp": 1},
    "pp 2": {"pp": 2},
    "pp 2 vpp 2": {"pp": 2, "vpp": 2},
    "pp 2 tp 2": {"pp": 2, "tp": 2},
    "cp 2": {"cp": 2},
    "cp 2 heads": {"cp": 2, "cp_comm_type": CpComm.all_to_all},
    "cp 2 ep 2": {"cp": 2, "ep": 2},
}


def run_of(name: str, **parallel: Any) -> Run:
    return make_run(MODELS[name], parallel=ParallelConfig(**({"dp": 1} | parallel)))


def greedy(engine: Model, recorder: Recorder | None = None) -> tuple[list[list[int]], Values]:
    """The prompts with what follows, and the logits that said so."""
    decoder = Decoder(engine, len(PROMPTS), PLACES, recorder)
    found = [decoder.prompts(PROMPTS)]
    sequences = [list(prompt) for prompt in PROMPTS]
    for _ in range(STEPS):
        for sequence, token in zip(sequences, found[-1].argmax(-1).tolist(), strict=True):
            sequence.append(token)
        found.append(decoder.step([sequence[-1] for sequence in sequences]))
    assert len({logits.data_ptr() for logits in found}) == len(found), "none is overwritten"
    return sequences, numbered(logits.numpy() for logits in found)


@torch.no_grad()
def whole(engine: Engine, sequences: list[list[int]]) -> Values:
    """Compute the same logits by forwards of whole sequences, one after the other."""
    (chunk,) = engine.chunks
    found = []
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        tokens_1S = torch.tensor([sequence])
        context = chunk.context(torch.arange(len(sequence))[None], None)
        logits_SV = chunk.logits(chunk(tokens_1S, context).x)[0]
        found.append(logits_SV[len(prompt) - 1 :])
    return numbered(torch.stack(found, dim=1).numpy())


def exactly_whole(rank: int, run: Run, sequences: list[list[int]]) -> Values:
    with exact_engine(rank, run) as engine:
        return whole(engine, sequences)


def both(engine: Engine) -> tuple[list[list[int]], Values, Values]:
    sequences, found = greedy(engine)
    return sequences, found, whole(engine, sequences)


@cache
def alone(name: str) -> tuple[list[list[int]], Values, Values, Values]:
    """Return, for one process, sequences and logits: with a cache, without one, and in fp64."""
    run = run_of(name)
    ((sequences, found, plain),) = run_distributed(here, 1, run, both)
    (exact,) = run_distributed(exactly_whole, 1, run, sequences)
    return sequences, found, plain, exact


PAIRS = [
    (name, layout)
    for name in MODELS
    for layout, degrees in LAYOUTS.items()
    if ("ep" not in degrees or MODELS[name].moe)
    and ("cp" not in degrees or MODELS[name].linear_attention is None)
]
