"""Hugging Face models are asked as checkpoints are: the same texts, the same numbers; and
lm-evaluation-harness finds these numbers too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from app.cli import convert
from app.cli.options.saved import saved_run
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.scoring import Question, window_losses
from app.engine.decoding.trained import TrainedModel, weights_at
from app.engine.files.run_folder import plain
from app.engine.ranks.groups import create_groups
from app.engine.start.start import check_tokenizer
from app.errors import ConfigError
from app.planner.plan import Plan
from tests.distributed import run_distributed
from tests.integration.evaluate import evaluated
from tests.integration.generate import generated
from tests.pretrained_model import CONTEXT, TEXT, save_pretrained
from tests.runs import make_run, with_model

QUESTIONS = [
    {"prompt": "the cat sat on", "choices": [" the mat", " a hat", " that"], "answer": 0},
    {"prompt": "and the dog ", "choices": ["ate", "sat on the mat"], "answer": 1},
    {"prompt": "that", "choices": [" hat", " dog", " cat and the dog", "s"], "answer": 2},
    {"prompt": "a mat: ", "choices": ["on", "off, I would say"], "answer": 0},
    {"prompt": "", "choices": ["the cat", "a", "that hat sat"], "answer": 1},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model as others give it, as a checkpoint that no run has trained, and exported."""
    home = tmp_path_factory.mktemp("models")
    found = {name: home / name for name in ("theirs", "run", "out")}
    save_pretrained(found["theirs"], experts=4)
    for words in (["from-hf", "theirs", "run"], ["to-hf", "run", "out"]):
        assert convert.main([words[0], *(str(home / name) for name in words[1:])]) == 0
    (home / "text.txt").write_text(TEXT)
    lines = [json.dumps(question) + "\n" for question in QUESTIONS]
    (home / "questions.jsonl").write_text("".join(lines))
    return found


def test_a_model_s_folder_is_asked_as_a_run_is(folders: dict[str, Path]):
    words = ("prompt=the cat", "max_new_tokens=12", "temperature=0")
    texts = {name: generated(folder, *words) for name, folder in folders.items()}
    codes, said, told = zip(*texts.values(), strict=True)
    assert codes == (0, 0, 0), told
    assert len(set(said)) == 1 and said[0].startswith("the cat") and len(said[0]) > 10
    assert all(f"float32, 1 process on cpu, context {CONTEXT}" in err for err in told)
    known = {name: evaluated(folder, "data.path=text.txt") for name, folder in folders.items()}
    numbers = {each[:2] for each in known.values()}
    assert len(numbers) == 1, known
    assert known["out"][1].startswith("perplexity ") and f"context {CONTEXT}" in known["out"][1]


def test_where_training_began_need_not_be_there():
    config = plain(asdict(with_model(make_run(), init_from="/nowhere/model")))
    run = saved_run(config, ["train.seq_len=24"], None)
    assert (run.model.init_from, run.train.seq_len) == (None, 24)


@pytest.mark.parametrize("word", ["num_layers=2", "moe.num_experts=2", "moe=null"])
def test_weights_are_of_one_model(word: str):
    config = plain(asdict(make_run()))
    key, _, value = f"model.{word}".partition("=")
    with pytest.raises(ConfigError, match="the weights are of a model with") as refused:
        saved_run(config, ["model.rope_theta=5", f"{key}={value}"], None)
    assert str(refused.value).startswith(f"{key}={value}: ")


@pytest.mark.full
def test_a_model_s_folder_is_cut_as_a_checkpoint_is(folders: dict[str, Path]):
    alone = evaluated(folders["out"], "choices=questions.jsonl")
    for layout in ("parallel.tp=2", "parallel.pp=2"):
        assert evaluated(folders["out"], "choices=questions.jsonl", layout)[:2] == alone[:2]


HARNESS_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def harness(folder: Path, questions: Path) -> tuple[dict[str, float], list[list[float]]]:
    """What lm-evaluation-harness says of a model: its results, and nats of every choice."""
    home = folder.parent / "harness"
    home.mkdir()
    (home / "ours.yaml").write_text(HARNESS_TASK.format(name="ours", questions=questions))
    given = f"pretrained={folder},dtype=float32"
    line = ["--model", "hf", "--model_args", given, "--tasks", "ours", "--include_path", str(home)]
    more = ["--device", "cpu", "--batch_size", "2", "--output_path", str(home), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", *line, *more],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (results,) = home.rglob("results_*.json")
    (samples,) = home.rglob("samples_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    nats = [[-float(said[0][0]) for said in row["resps"]] for row in rows]
    return json.loads(results.read_text())["results"]["ours"], nats


def nats_of_choices(rank: int, folder: Path) -> list[float]:
    source = weights_at(folder)
    run = saved_run(source.config, [], 1)
    plan = Plan(run)
    groups = create_groups(plan.layout, rank)
    model = TrainedModel.load(source, plan, groups, torch.device("cpu"))
    tokenizer = check_tokenizer(run)
    questions = [Question(**{**each, "choices": tuple(each["choices"])}) for each in QUESTIONS]
    told = [window for question in questions for window in question.windows(tokenizer)]
    return [lost for _, lost in window_losses(Decoder(model, 3, 0), told)]


@pytest.mark.full
def test_the_harness_finds_the_same(folders: dict[str, Path]):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; make test-all installs it")
    results, nats = harness(folders["out"], folders["out"].parent / "questions.jsonl")
    (ours,) = run_distributed(nats_of_choices, 1, folders["out"])
    assert [lost for each in nats for lost in each] == pytest.approx(ours, rel=1e-4)
    code, out, err = evaluated(folders["run"], "choices=questions.jsonl")
    assert code == 0, err
    plain_accuracy, normalised = re.findall(r"[01]\.\d{4}", out)
    assert f"{results['acc,none']:.4f}" == plain_accuracy
    assert f"{results['acc_norm,none']:.4f}" == normalised
