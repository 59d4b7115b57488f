"""Where generated texts end and what stands in front of them, for models whose next token is known:
by the files that came with the model, in its own folder, as a run, and exported.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from app.cli import convert
from app.data.tokenizer import load_tokenizer
from app.engine.decoding.model_tokens import generation_ends, prefix_token
from app.errors import ConfigError
from tests.cases import chosen
from tests.hf_folders import transformers
from tests.integration.generate import generated
from tests.integration.model_ends import SIZE, SPECIAL, WORDS, tokenizer_of_words
from tests.programs import run_forked
from tests.training import ROOT, corpus_in

CHAIN = [*WORDS[:4], "<turn>", "▁jumps", "</s>", "▁the"]


def save_chain(folder: Path, **files: dict[str, object]) -> Tokenizer:
    """A model that follows each token of CHAIN with the next; files beside it by name."""
    tokenizer = tokenizer_of_words()
    assert tokenizer.get_vocab_size() <= SIZE
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=SIZE,
            hidden_size=SIZE,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        model.lm_head.weight.zero_()
        for token, following in pairwise(CHAIN):
            ids = tokenizer.token_to_id(following), tokenizer.token_to_id(token)
            model.lm_head.weight[ids] = 1
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, contents in files.items():
        path = folder / f"{name}.json"
        was = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(was | contents))
    return tokenizer


TURN = SPECIAL.index("<turn>")
FILES: dict[str, dict[str, dict[str, object]]] = {
    "one id": {"generation_config": {"eos_token_id": TURN}},
    "several ids": {"generation_config": {"eos_token_id": [2, TURN]}},
    "the model's ids": {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 3}},
    "settings": {"tokenizer_config": {"eos_token": {"content": "<turn>"}, "bos_token": "<s>"}},
}
GREEDY = ("prompt=the quick", "temperature=0", "max_new_tokens=8")


@pytest.mark.parametrize("case", chosen(FILES, ["several ids", "settings"]))
def test_model_ends_are_ends(case: str, tmp_path: Path):
    save_chain(tmp_path / "theirs", **FILES[case])
    code, out, err = generated(tmp_path / "theirs", *GREEDY)
    assert (code, out) == (0, "the quick brown fox\n"), err


def test_other_ends_and_stop_tokens(tmp_path: Path):
    folder = tmp_path / "theirs"
    save_chain(folder)
    assert generated(folder, *GREEDY)[1] == "the quick brown fox jumps\n", "<turn> is no text"
    assert generated(folder, *GREEDY, "stop=<turn>")[1] == "the quick brown fox\n"
    assert generated(folder, *GREEDY, "stop= fox", "stop=<turn>")[1] == "the quick brown\n"
    assert generated(folder, *GREEDY, "stop=fox")[1] == "the quick brown \n"
    code, out, err = generated(folder, *GREEDY, "stop= fox<turn>")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "stop= fox<turn>: mixes the special token '<turn>' with text" in err


def test_prompts_of_several_lengths_end_alike(tmp_path: Path):
    save_chain(tmp_path / "theirs", **FILES["several ids"])
    prompts = ("prompt=the quick", "prompt=the", "prompt=jumps", "prompt=the quick brown")
    code, out, err = generated(tmp_path / "theirs", *prompts, *GREEDY[1:])
    assert code == 0, err
    texts = [part.splitlines()[1] for part in ("\n" + out).split("\n== ")[1:]]
    assert texts == ["the quick brown fox", "the quick brown fox", "jumps", "the quick brown fox"]


@pytest.mark.parametrize("seed", [str(2**63), "-1", "1" * 5000, "x"])
def test_seed_out_of_bounds_costs_one_line(seed: str, tmp_path: Path):
    save_chain(tmp_path / "theirs")
    code, out, err = generated(tmp_path / "theirs", "prompt=the", f"seed={seed}")
    assert (code, out, err.count("\n")) == (2, "", 1) and "generate: seed=" in err


def test_largest_seed_is_taken(tmp_path: Path):
    save_chain(tmp_path / "theirs")
    words = ("prompt=the", "prompt=the", "batch=1", "max_new_tokens=1", f"seed={2**63 - 1}")
    code, _, err = generated(tmp_path / "theirs", *words)
    assert code == 0, err


def test_ends_come_along_with_runs_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Converted, trained for a step, continued in another folder, and exported from there."""
    monkeypatch.chdir(tmp_path)
    save_chain(
        tmp_path / "theirs",
        generation_config={"eos_token_id": [TURN]},
        tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"},
    )
    assert convert.main(["from-hf", "theirs", "converted"]) == 0
    assert generated(tmp_path / "converted", *GREEDY)[1] == "the quick brown fox\n"
    words = [word for word in corpus_in(tmp_path / "corpus") if not word.startswith("model")]
    words += ["model=pretrained", "model.init_from=theirs", "data.tokenizer=theirs/tokenizer.json"]
    words += ["optim.lr=1e-6", "optim.min_lr=1e-6"]
    first = ["run_dir=run", "train.steps=1", "checkpoint.interval=1"]
    second = ["run_dir=branch", "train.steps=2", "resume=run/checkpoints/step-00000001"]
    for more in (first, [*second, "log.console=true"]):
        line = [sys.executable, str(ROOT / "train.py"), *words, *more]
        ended = run_forked(tmp_path, line)
        assert ended.returncode == 0, ended.stderr
        settings = {"eos_token": "<turn>", "bos_token": "<s>"}
        (tmp_path / "theirs/tokenizer_config.json").write_text(json.dumps(settings))
    assert (
        "documents still end with '</s>', although theirs/tokenizer.json ends them with '<turn>'"
    ) in ended.stdout
    assert json.loads((tmp_path / "branch/tokenizer_config.json").read_text()) == {
        "eos_token": "</s>"
    }
    assert convert.main(["to-hf", "branch", "out"]) == 0
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [
        TURN,
        2,
    ]
    for folder in ("run", "branch", "out"):
        assert generated(tmp_path / folder, *GREEDY)[1] == "the quick brown fox\n", folder
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (loaded.eos_token, loaded.bos_token) == ("</s>", "<s>")


PREFIXES: dict[str, tuple[dict[str, dict[str, object]], str]] = {
    "begin of texts": ({"tokenizer_config": {"eos_token": "</s>", "bos_token": "<s>"}}, "<s>"),
    "none": ({"tokenizer_config": {"eos_token": "<turn>", "bos_token": None}}, "<turn>"),
    "of the model, without settings": ({"config": {"bos_token_id": 1}}, "<s>"),
    "no special one": ({"generation_config": {"bos_token_id": 9}}, "</s>"),
}


@pytest.mark.parametrize("case", PREFIXES)
def test_prefix_is_the_begin_or_the_end(case: str, tmp_path: Path):
    files, prefix = PREFIXES[case]
    tokenizer_of_words().save(str(tmp_path / "tokenizer.json"))
    for name, contents in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(contents))
    found = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert prefix_token(tmp_path, found) == SPECIAL.index(prefix)


def test_tokens_of_no_model_are_those_of_the_tokenizer(tmp_path: Path):
    tokenizer_of_words().save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(str(tmp_path / "tokenizer.json"))
    nowhere = tmp_path / "nowhere"
    assert (prefix_token(nowhere, found), generation_ends(nowhere, found)) == (2, {2})
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<x>"}')
    with pytest.raises(ConfigError, match="bos_token='<x>' is not in the vocabulary"):
        prefix_token(tmp_path, found)
