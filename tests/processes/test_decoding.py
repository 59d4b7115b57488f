"""A model with a memory of keys and values says what it says of whole sequences: position by
position, for prompts of different lengths, at every layout.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from app.engine.capture.stand_in import HostRecorder
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.drawing import Sampling
from app.engine.decoding.generate import sample_tokens
from app.engine.decoding.texts import drawn_tokens
from app.engine.step.engine import Engine
from app.planner.decoding import decoding_memory
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.parity import here
from tests.processes.decoding import (
    LAYOUTS,
    MODELS,
    PAIRS,
    PLACES,
    PROMPTS,
    STEPS,
    alone,
    greedy,
    run_of,
)
from tests.rounding import Values, expect_alike, numbered

QUICK = [("moe", "tp 2 ep 2"), ("dense", "pp 2 tp 2"), ("latent", "tp 2"), ("moe", "cp 2 ep 2"),
         ("static", "ep 2"), ("latent", "pp 2"), ("windows", "pp 2 tp 2")]  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logits_are_those_of_whole_sequences(name: str):
    sequences, found, plain, exact = alone(name)
    expect_alike(found, plain, exact, case=name)
    for step in range(STEPS):
        said = plain[str(step)].argmax(-1).tolist()
        assert said == [
            sequence[len(prompt) + step]
            for prompt, sequence in zip(PROMPTS, sequences, strict=True)
        ]
    assert len({token for sequence in sequences for token in sequence}) > 8, "says something"


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "layout"), chosen(PAIRS, QUICK))
def test_every_layout_generates_same_text(name: str, layout: str):
    sequences, _, plain, exact = alone(name)
    run = run_of(name, **LAYOUTS[layout])
    for said, found in run_distributed(here, run.world_size, run, greedy):
        assert said == sequences
        expect_alike(found, plain, exact, case=layout)


def captured(engine: Engine) -> tuple[bool, int]:
    """Return whether replayed steps are bit-identical, and the number of recordings."""
    eager = greedy(engine)
    recorder = HostRecorder()
    replayed = greedy(engine, recorder)
    same = replayed[0] == eager[0] and all(
        (replayed[1][step] == logits).all() for step, logits in eager[1].items()
    )
    count = len(recorder.recordings)
    recorder.release()
    return same, count


CAPTURED = [
    *(("moe", degrees) for degrees in ("pp 2 vpp 2", "cp 2")),
    *((name, "tp 2") for name in ("dense", "plain queries")),
    ("latent", "pp 2"),
    ("static", "ep 2"),
    *((name, "") for name in MODELS),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    chosen(CAPTURED, [("latent", ""), ("moe", ""), ("windows", ""), ("static", "ep 2")]),
)
def test_captured_steps_say_the_same(name: str, layout: str):
    degrees = LAYOUTS.get(layout, {})
    run = run_of(name, **degrees)
    for same, recordings in run_distributed(here, run.world_size, run, captured):
        assert same and recordings == degrees.get("vpp", 1)


def test_what_waits_for_the_host_is_not_captured():
    run = run_of("moe", ep=2, dp=2)
    assert run_distributed(here, 2, run, captured) == [(True, 0)] * 2


def one_by_one(engine: Engine) -> tuple[list[Values], int]:
    """Each prompt alone, by one memory that the others have used."""
    decoder = Decoder(engine, 1, PLACES)
    found = []
    for prompt in PROMPTS:
        logits = [decoder.prompts([prompt])]
        for _ in range(STEPS):
            logits.append(decoder.step(logits[-1].argmax(-1)))
        found.append(numbered(each[0].numpy() for each in logits))
    return found, decoder.nbytes


def test_neighbours_and_earlier_prompts_change_nothing():
    _, _, plain, exact = alone("latent")
    ((found, nbytes),) = run_distributed(here, 1, run_of("latent"), one_by_one)
    for nth, each in enumerate(found):
        expect_alike(
            each,
            {name: values[nth] for name, values in plain.items()},
            {name: values[nth] for name, values in exact.items()},
        )
    mla = MODELS["latent"].mla
    assert nbytes == 4 * PLACES * (mla.kv_lora_rank + mla.qk_rope_head_dim) * 4


def forwards_of_sample(engine: Engine) -> tuple[list[int], list[int], list[int]]:
    """A sample, and the tokens that the model was given by and by: in steps, in prompts."""
    steps, prompts = [], []
    with (
        patch.object(Decoder, "step", noting(steps, Decoder.step)),
        patch.object(Decoder, "prompts", noting(prompts, Decoder.prompts)),
    ):
        drawn = list(sample_tokens(engine, [3, 1, 4], 9, window=8, vocab=64, seed=2))
    return drawn, steps, [prompt for (prompt,) in prompts]


def noting(notes: list[Any], method: Any) -> Any:
    def call(self: Decoder, given: Any) -> torch.Tensor:
        notes.append(given)
        return method(self, given)

    return call


def test_sample_takes_a_step_per_token_within_window():
    ((drawn, steps, prompts),) = run_distributed(here, 1, run_of("moe"), forwards_of_sample)
    tokens = [3, 1, 4, *drawn]
    assert len(drawn) == 9
    assert steps == [[token] for token in drawn[:5]]
    assert prompts == [[3, 1, 4], *(tokens[end - 8 : end] for end in range(9, 12))]


def held_and_planned(engine: Engine) -> tuple[list[int], list[int]]:
    """Bytes of weights, and of keys and values of every layer and of all."""
    decoder = Decoder(engine, len(PROMPTS), PLACES)
    caches = [cache for cached in decoder.cached for cache in cached.caches]
    tensors = [[each for each in vars(cache).values() if torch.is_tensor(each)] for cache in caches]
    layers = [sum(each.untyped_storage().nbytes() for each in own) for own in tensors]
    weights = sum(param.nbytes for chunk in engine.chunks for _, param in chunk.named_parameters())
    assert sum(layers) == decoder.nbytes
    rank = engine.groups.pp_rank
    planned = decoding_memory(engine.plan, rank, len(PROMPTS), tokens=PLACES)
    found = [weights, *layers, decoder.nbytes]
    return found, [planned.weights, *planned.caches, planned.keys_values]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    chosen(
        [*PAIRS, *((name, "") for name in MODELS)],
        [("dense", ""), ("dense", "pp 2 tp 2"), ("latent", "tp 2"), ("latent", "cp 2"),
         ("moe", "ep 2"), ("windows", ""), ("latent windows", "")],
    ),
)  # fmt: skip
def test_as_much_memory_is_taken_as_planned(name: str, layout: str):
    run = run_of(name, **LAYOUTS.get(layout, {}))
    for found, planned in run_distributed(here, run.world_size, run, held_and_planned):
        assert found == planned


MANY = [*PROMPTS, [8, 8], [2, 4, 6, 8], [1]]


def shared(engine: Engine, temperature: float) -> tuple[list[list[int]], int]:
    """Return continuations of prompts split over replicas, and how many this one continued."""
    own = len(MANY) // engine.groups.layout.dp
    decoder = Decoder(engine, own, PLACES)
    sampling = Sampling(temperature)
    given: list[Any] = []
    with patch.object(Decoder, "step", noting(given, Decoder.step)):
        tokens = drawn_tokens(
            decoder, MANY, STEPS, sampling=sampling, seed=4, vocab=60, ended=lambda: False
        )
        found = list(tokens)
    assert all(len(each) == own for each in given) and len(given) == STEPS - 1
    return found, own


SHARED = [("dense", {"dp": 2}), ("latent", {"dp": 2, "tp": 2}), ("moe", {"dp": 2, "ep": 2}),
          ("static", {"dp": 2, "ep": 2}), ("moe", {"dp": 2, "pp": 2}),
          ("dense", {"dp": 2, "cp": 2})]  # fmt: skip


@pytest.mark.every(6)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("name", "degrees"), chosen(SHARED, SHARED[:3]), ids=str)
def test_replicas_share_prompts(name: str, degrees: dict[str, int], temperature: float):
    continued = partial(shared, temperature=temperature)
    ((alone_said, _),) = run_distributed(here, 1, run_of(name), continued)
    run = run_of(name, **degrees)
    for said, own in run_distributed(here, run.world_size, run, continued):
        assert said == alone_said and own == len(MANY) // degrees["dp"]
