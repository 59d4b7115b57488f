"""Choices score as lm-evaluation-harness scores them, with and without a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.cli.options.saved import saved_run
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.model_tokens import prefix_token
from app.engine.decoding.scoring import Question, accuracy, window_losses
from app.engine.decoding.trained import TrainedModel, weights_at
from app.engine.ranks.groups import create_groups
from app.engine.start.start import check_tokenizer
from app.planner.plan import Plan
from tests.distributed import run_distributed
from tests.hf_folders import transformers
from tests.integration.model_ends import SIZE, tokenizer_of_words
from tests.tensors.hf_weights import spread_weights

CONTEXT = 16
QUESTIONS = [
    ("", ("the quick", "brown fox", "fox"), 1),
    ("", ("a", "jumps", "thé 日本"), 2),
    (" ", ("the", "quick brown the"), 0),
    ("the ", ("quick", "brown fox"), 0),
    ("the quick", (" brown", " fox jumps", "er"), 1),
    ("", ("<s>the", "the"), 0),  # a choice that begins with the prefix
    ("", ("the " * 15 + "fox", "fox"), 0),  # as long as the context
]
SETTINGS: dict[str, dict[str, Any]] = {
    "begin of texts": {"bos_token": "<s>", "eos_token": "</s>"},
    "end of documents": {"eos_token": "</s>"},
    "end of another name": {"eos_token": "<turn>"},
}


def save_model(folder: Path, settings: dict[str, Any]) -> None:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    model = transformers.LlamaForCausalLM(config)
    spread_weights(model)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer_of_words().save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def ours(rank: int, folder: Path) -> tuple[list[float], float, float]:
    """Nats of every choice, and both accuracies."""
    source = weights_at(folder)
    run = saved_run(source.config, [], 1)
    plan = Plan(run)
    model = TrainedModel.load(source, plan, create_groups(plan.layout, rank), torch.device("cpu"))
    tokenizer = check_tokenizer(run)
    prefix = prefix_token(source.texts, tokenizer)
    told = [Question(*each) for each in QUESTIONS]
    decoder = Decoder(model, 3, 0)
    windows = [window for each in told for window in each.windows(tokenizer, prefix)]
    nats = [lost for _, lost in window_losses(decoder, windows)]
    found = accuracy(decoder, told, tokenizer, lambda _: None, prefix=prefix)
    return nats, found.plain, found.normalised


def theirs(folder: Path) -> tuple[list[float], float, float]:
    """The same by the harness' model and its arithmetic of multiple choice."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    judge = HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)
    nats: list[float] = []
    plain = normalised = 0
    for prompt, choices, answer in QUESTIONS:
        # it asserts a token before choices behind a prompt of blanks alone: these are the choices'
        blank, given = ("", prompt) if prompt.strip() else (prompt, "")
        asked = [
            Instance("loglikelihood", {}, (given, blank + choice), 0, ("", 0, 1))
            for choice in choices
        ]
        found = [likely for likely, _ in judge.loglikelihood(asked, disable_tqdm=True)]
        shares = [likely / len(choice) for likely, choice in zip(found, choices, strict=True)]
        plain += found.index(max(found)) == answer
        normalised += shares.index(max(shares)) == answer
        nats += [-likely for likely in found]
    return nats, plain / len(QUESTIONS), normalised / len(QUESTIONS)


@pytest.mark.full
@pytest.mark.parametrize("case", SETTINGS)
def test_scores_are_those_of_the_harness(case: str, tmp_path: Path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; make test-all installs it")
    save_model(tmp_path, SETTINGS[case])
    (found,) = run_distributed(ours, 1, tmp_path)
    expected = theirs(tmp_path)
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    assert found[1:] == expected[1:]
