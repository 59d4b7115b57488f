"""Hydra as people use it: options of their own, experiments beside groups, completion, other
sweepers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from app.cli.options.arguments import Typed, flags_first, with_sweep_folder
from app.cli.options.compose import load_overrides, load_typed
from app.cli.options.listings import values_of
from app.cli.plan import main as plan
from app.cli.start.overlaid import overlaid
from app.version import Version
from tests.programs import run_forked

ROOT = Path(__file__).parent.parent.parent
MINE = """\
# @package _global_
train: {steps: 2, seq_len: 16, eval_interval: 1, eval_sequences: 8, sample_tokens: 0}
checkpoint: {interval: 1}
log: {console: false, wandb: false}
"""
SMALL = ("model=dense_tiny", "model.num_layers=1", "model.hidden_size=32", "optim.warmup_steps=1")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder outside of the repository: an experiment of one's own, and a corpus."""
    (tmp_path / "own/experiment").mkdir(parents=True)
    (tmp_path / "own/experiment/mine.yaml").write_text(MINE)
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text())
    return tmp_path


def program(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "train.py"), *arguments]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **env}
    return run_forked(folder, line, env, tree=True)


def sweep(folder: Path, *arguments: str) -> tuple[dict[str, Any], Path]:
    data = ("data=text", "data.path=text.txt", f"data.cache_dir={folder}/cache")
    done = program(folder, "-m", *arguments, "+experiment=mine", *SMALL, *data)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = folder.glob("sweeps/*/sweep.json")
    return json.loads(record.read_text()), record.parent


PLACES = (["--config-dir", "own"], ["hydra.searchpath=[file://{}/own]"])


@pytest.mark.full
@pytest.mark.parametrize("place", [PLACES[0], pytest.param(PLACES[1], marks=pytest.mark.full)])
def test_options_of_ones_own_reach_the_jobs_of_a_sweep(own: Path, place: list[str]):
    found, folder = sweep(own, *(each.format(own) for each in place), "train.seed=1")
    assert [job["state"] for job in found["jobs"]] == ["done"]
    (config,) = folder.glob("*/config.yaml")
    assert OmegaConf.load(config).train.steps == 2


def test_options_of_ones_own_reach_the_plan(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(own)
    for place in (["--config-dir", "own"], [f"hydra.searchpath=[file://{own}/own]"]):
        assert plan(["what=stages", *place, "+experiment=mine"]) == 0
        assert " 2 steps, " in capsys.readouterr().out


def test_flags_are_taken_behind_overrides_too():
    arguments = ["-m", "a=1", "--config-dir", "own", "b=2", "-cn", "other", "a=1"]
    typed = Typed.parse(arguments)
    assert (typed.overrides, typed.config_dir, typed.config_name) == (
        ("a=1", "b=2", "a=1"),
        "own",
        "other",
    )
    assert flags_first(arguments, typed) == [
        "-m",
        "--config-dir",
        "own",
        "-cn",
        "other",
        "a=1",
        "b=2",
        "a=1",
    ]
    assert typed.words == ["--config-dir", "own", "--config-name", "other", "a=1", "b=2", "a=1"]


@pytest.mark.full
def test_what_an_experiment_overlays_is_told():
    """`+experiment=` is merged last: what it has counts, and an option chosen beside it may say
    otherwise.
    """
    typed = Typed(("+experiment=smoke", "checkpoint=none", "log=wandb", "train.steps=3"))
    assert overlaid(typed) == [
        "checkpoint=none: +experiment=smoke sets checkpoint.interval=5 over it; "
        "keys that are typed count over both"
    ]
    assert overlaid(typed.with_overrides(["checkpoint.interval=0"])) == []
    assert overlaid(Typed(("checkpoint.interval=0", "checkpoint=none", "+experiment=smoke"))) == []
    assert overlaid(Typed(("checkpoint=none",))) == []


def test_a_run_tells_what_its_experiment_overlays(own: Path):
    typed = "+experiment=mine", "checkpoint=none", "data=text", "data.path=nowhere"
    done = program(own, "--config-dir", "own", *typed)
    assert (
        done.stderr.splitlines()[0]
        == "train.py: checkpoint=none: +experiment=mine sets checkpoint.interval=1 over it; "
        "keys that are typed count over both"
    )


def test_the_plan_tells_what_its_experiment_overlays(capsys: pytest.CaptureFixture[str]):
    assert plan(["what=stages", "+experiment=smoke", "checkpoint=none"]) == 0
    assert (
        capsys.readouterr().err
        == "plan: checkpoint=none: +experiment=smoke sets checkpoint.interval=5 over it; "
        "keys that are typed count over both\n"
    )


@pytest.mark.full
def test_keys_of_a_section_of_the_experiment_are_accepted(
    capsys: pytest.CaptureFixture[str],
):
    own = "+experiment=deepseek_v3_2048", "model.mla.q_lora_rank=1024", "hardware=h200"
    assert plan(["what=stages", *own]) == 0
    assert capsys.readouterr().err == ""


def test_the_version_is_ours(own: Path):
    done = program(own, "--version")
    assert (done.returncode, done.stdout) == (0, f"graphfold {Version.of().short}\n")


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("train.device=", "train.device=auto train.device=cpu train.device=cuda"),
        ("train.deterministic=f", "train.deterministic=false"),
        ("optim.decay=co", "optim.decay=constant optim.decay=cosine"),
        ("optim.lr=", "optim.lr=0.003"),
        ("model=mo", "model=moe_tiny"),
        ("train.ste", "train.steps="),
        ("optim.w", "optim.warmup_steps= optim.weight_decay= optim.wsd_decay_steps="),
        ("schedule.", "schedule.name="),
        ("schedule.t", "schedule.timeout_s="),
        ("optim.overlap_grads=", "optim.overlap_grads=false optim.overlap_grads=true"),
    ],
)
def test_completion_offers_what_one_may_type(own: Path, word: str, offered: str):
    done = program(own, "-sc", "query=bash", COMP_LINE=f"python train.py {word}")
    assert sorted(done.stdout.split()) == offered.split(), done.stderr


def test_composed_configuration_lists_advanced_keys_that_are_set(own: Path):
    words = ("model=deepseek_v3_like", "schedule.timeout_s=9", "hardware.efficiency=0.4")
    shown = yaml.safe_load(program(own, "--cfg", "job", *words).stdout)
    assert shown["model"]["yarn"]["factor"] == 40
    assert shown["schedule"] == {"name": "auto", "timeout_s": 9.0}
    assert not {"efficiency", "profile"} & shown["hardware"].keys()
    (own / "shown.yaml").write_text(yaml.safe_dump({"defaults": ["train", "_self_"], **shown}))
    typed = Typed.parse(["--config-dir", str(own), "--config-name", "shown"])
    assert load_typed(typed) == load_overrides(words)
    every = yaml.safe_load(program(own, "--cfg", "all", *words).stdout)
    assert every["hardware"]["efficiency"] == 0.4 and "hydra" in every


def test_completion_of_what_may_be_null():
    assert values_of("parallel.dp") == ["null"] and values_of("model.nothing") == []
    assert values_of("cuda_graph.scope")[:2] == ["attn", "mlp"]


def test_the_folder_of_other_sweepers():
    """conf/ has sweeps/{name}, which our own sweeper fills in."""
    asked = with_sweep_folder(["-m", "hydra/sweeper=basic", "a=1"])
    assert asked[-1].startswith("hydra.sweep.dir=sweeps/basic-") and len(asked) == 4
    for same in (
        ["hydra/sweeper=basic"],
        ["-m", "a=1"],
        ["-m", "hydra/sweeper=basic", "hydra.sweep.dir=x"],
    ):
        assert with_sweep_folder(same) == same


@pytest.mark.full
def test_hydras_own_sweeper_runs(own: Path):
    found, folder = sweep(own, "hydra/sweeper=basic", "--config-dir", "own", "optim.lr=1e-3,2e-3")
    assert [(job["state"], job["swept"]) for job in found["jobs"]] == [
        ("done", ["optim.lr=0.001"]),
        ("done", ["optim.lr=0.002"]),
    ]
    assert {path.name for path in (own / "sweeps").iterdir()} == {folder.name}


@pytest.mark.full
def test_optuna_searches_for_the_lowest_validation_loss(own: Path):
    pytest.importorskip("optuna", reason="optuna is not installed; make test-all installs it")
    swept = (
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=1",
    )
    found, folder = sweep(
        own, *swept, "--config-dir", "own", "optim.lr=tag(log,interval(1e-3,1e-1))"
    )
    best = OmegaConf.load(folder / "optimization_results.yaml")
    losses = []
    for job in found["jobs"]:
        rows = map(json.loads, (folder / job["folder"] / "metrics.jsonl").read_text().splitlines())
        losses.append(min(row["val_loss"] for row in rows if "val_loss" in row))
    assert len(losses) == 3 and best.best_value == min(losses)
