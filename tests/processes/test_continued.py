"""Continued pre-training as a user starts it: from a Hugging Face folder, with a new optimizer and
a schedule that begins anew. The first loss is `transformers`' on the tokens that the run sees.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config import Run
from app.data.feed import Cursor, TrainFeed
from app.data.load import load_data
from app.data.tokenizer import load_tokenizer
from app.engine.checkpoint.weights import SavedWeights
from app.engine.files.checkpoints import CHECKPOINTS, read_manifest
from app.engine.files.run_folder import read_metrics
from app.plan.sharding.reshard import Block
from tests.hf_folders import loaded, save_random, their_logits
from tests.programs import run_forked
from tests.training import ROOT, composed, corpus_in

LR = 1e-3
# overrides, and the learning rates of six steps as shares of the peak
WSD = (
    ["optim=adamw_wsd", "optim.warmup_steps=2", "optim.wsd_decay_steps=2", "optim.decay_steps=6"],
    [0.5, 1, 1, 1, 1 - math.sqrt(0.5), 0],
)
REWARMED = (
    ["optim.warmup_steps=3", "optim.min_lr=0", "optim.decay_steps=6"],
    [1 / 3, 2 / 3, 1, 0.75, 0.25, 0],
)
NORM = "layers.0.attn_norm.weight"


def trained(folder: Path, typed: Sequence[str]) -> list[dict[str, Any]]:
    """The reports of `train.py` with these arguments, whose ranks it starts itself."""
    ended = run_forked(folder, [sys.executable, str(ROOT / "train.py"), *typed], tree=True)
    assert ended.returncode == 0, ended.stderr
    return [row for row in read_metrics(folder / "run") if "loss" in row]


def their_first_loss(model: torch.nn.Module, run: Run) -> float:
    """Mean over all tokens of the run's first step."""
    tokenizer = load_tokenizer(run.data.tokenizer)
    data, _ = load_data(run.data, run.train.seq_len, run.train.seed, tokenizer=tokenizer)
    size, several = run.train.micro_batch, run.num_microbatches
    feeds = (
        TrainFeed(data, rank, run.dp, size, num_microbatches=several, cursor=Cursor())
        for rank in range(run.dp)
    )
    batches = [batch for feed in feeds for batch in feed.next_step()]
    tokens, labels = (
        torch.cat([getattr(batch, name) for batch in batches])
        for name in ("tokens_BS", "labels_BS")
    )
    logits = their_logits(model, tokens)
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def check_continued(
    name: str, layout: str, schedule: tuple[list[str], list[float]], folder: Path
) -> None:
    theirs, _ = save_random(name, folder / "theirs", vocab_size=264)
    typed, shares = schedule
    words = [
        *(word for word in corpus_in(folder / "corpus") if not word.startswith("model")),
        *("model=pretrained", f"model.init_from={folder}/theirs", f"run_dir={folder}/run"),
        *(
            *typed,
            f"optim.lr={LR}",
            "train.steps=6",
            "checkpoint.interval=1",
            "checkpoint.keep_last=9",
        ),
        *(f"parallel.{word}" for word in layout.split()),
    ]
    rows = trained(folder, words)
    run = composed(words, world_size=2)
    assert rows[0]["loss"] == pytest.approx(their_first_loss(theirs, run), abs=1e-4)
    assert [row["lr"] for row in rows] == pytest.approx([share * LR for share in shares], abs=1e-9)
    # Adam's first step from nothing is the learning rate, whatever the gradient
    before = loaded(folder / "theirs").state_dict()[NORM]
    path = folder / "run" / CHECKPOINTS / "step-00000001"
    after = SavedWeights(path, read_manifest(path)).read(NORM, Block.whole(*before.shape))
    moved = after - before
    assert moved.abs().median().item() == pytest.approx(shares[0] * LR, rel=1e-2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout", "schedule"),
    [("llama", "tp=2", WSD), ("mixtral", "ep=2 dp=2", REWARMED)],
    ids=["llama-tp2-wsd", "mixtral-ep2-rewarmed"],
)
def test_the_first_loss_of_a_run_is_that_of_transformers(
    name: str, layout: str, schedule: Any, tmp_path: Path
):
    check_continued(name, layout, schedule, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp=2", "tp=2 ep=2 etp=1", "ep=2 dp=2", "pp=2 layout=Ett|tL"])
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v2-lite", "deepseek_v3"])
def test_the_first_loss_of_runs_with_experts(name: str, layout: str, tmp_path: Path):
    check_continued(name, layout, WSD, tmp_path)
