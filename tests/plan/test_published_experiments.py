"""Whole experiments of published models: their plans fit, and their batches are whole."""

from __future__ import annotations

import re
from functools import cache

import pytest

from app.choices import Decay, Device, Dtype, Source
from app.plan.cost.flops import parameter_count, run_flops_per_token
from app.planner.plan import Plan
from tests.cases import chosen
from tests.config import CONF, load

# numbers of GPUs that the comment of each names
WORLDS = {
    "pretrain_small": (1, 8),
    "llama3_8b": (8, 16, 64),
    "mixtral_8x7b": (16, 64),
    "mixtral_8x7b_64": (64,),
    "qwen3_30b_a3b": (8, 16, 64),
    "qwen3_30b_a3b_16": (16, 64),
    "deepseek_v2_lite": (8, 16, 64),
    "gpt_oss_20b": (8, 16, 64),
}
CASES = [(name, world) for name, worlds in WORLDS.items() for world in worlds]
SAID = re.compile(r"(\d+) TFLOP/s per GPU")
MEMORY = re.compile(r"([\d.]+) of (79(?:\.1)?) GiB")
HOURS = re.compile(r"(\d+) hours")


@cache
def planned(name: str, world: int) -> Plan:
    return Plan(load(f"+experiment={name}", f"parallel.world_size={world}"))


def comment(name: str) -> str:
    text = (CONF / "experiment" / f"{name}.yaml").read_text().partition("defaults:")[0]
    return text.replace("\n# ", " ")


def tflops(plan: Plan) -> float:
    """Model FLOPs per GPU."""
    rate = plan.run.train.global_batch * plan.run.train.seq_len / plan.step_seconds
    return rate * run_flops_per_token(plan.run) / plan.run.world_size / 1e12


@pytest.mark.parametrize(("name", "world"), chosen(CASES, [("llama3_8b", 8)]))
def test_published_experiment_fits(name: str, world: int):
    plan = planned(name, world)
    replicas = plan.run.train.micro_batch * plan.run.dp
    assert plan.fits and plan.run.parallel.world_size == world
    assert plan.run.train.eval_sequences % replicas == 0


@pytest.mark.full
@pytest.mark.parametrize("name", WORLDS)
def test_comment_of_published_experiment_is_true(name: str):
    text, world = comment(name), WORLDS[name][0]
    plan = planned(name, world)
    needs = max(rank.total for rank in plan.memory) / 2**30
    hours = plan.run.steps * plan.step_seconds / 3600
    for said, value in ((HOURS, hours), (MEMORY, needs), (SAID, tflops(plan))):
        for found in said.findall(text):
            number = found[0] if isinstance(found, tuple) else found
            digits = len(number.partition(".")[2])
            assert number == f"{value:.{digits}f}", (name, said.pattern)
    assert HOURS.search(text) or (SAID.search(text) and MEMORY.search(text))
    assert f"`python train.py +experiment={name} data=jsonl data.path=corpus.jsonl`" in text


@pytest.mark.full
@pytest.mark.parametrize(
    ("wide", "name", "world"), [("mixtral_8x7b_64", "mixtral_8x7b", 64)] +
    [("qwen3_30b_a3b_16", "qwen3_30b_a3b", world) for world in (16, 64)],
)  # fmt: skip
def test_wider_layout_is_faster_there(wide: str, name: str, world: int):
    faster = planned(name, world).step_seconds / planned(wide, world).step_seconds
    assert faster > 1.05
    if said := re.search(r"(\d+) % faster", comment(wide)):
        assert said[1] == f"{100 * faster - 100:.0f}"


@pytest.mark.parametrize("name", chosen(WORLDS, ["gpt_oss_20b"]))
def test_published_experiment_is_a_whole_run(name: str):
    run = load(f"+experiment={name}")
    per_step = run.train.global_batch * run.train.seq_len
    assert 4096 <= run.train.seq_len <= 8192 and 0.5e6 <= per_step <= 4.2e6
    assert 17 <= run.steps * per_step / parameter_count(run.model).active <= 22
    assert run.optim.warmup_steps == 2000 < run.steps / 5
    assert run.optim.min_lr == pytest.approx(run.optim.lr / 10)
    assert run.optim.decay is Decay.cosine and run.checkpoint.interval == 500
    assert run.precision.params is Dtype.bfloat16 and not run.train.deterministic
    assert run.train.device is Device.cuda and run.data.tokenizer != "bytes"


def test_typed_keys_count_over_published_experiments():
    run = load("+experiment=gpt_oss_20b", "optim.lr=1e-4", "train.global_batch=1024",
               "cuda_graph=none", "data=text", "data.path=[x]", "model.num_layers=24")  # fmt: skip
    assert (run.optim.lr, run.train.global_batch) == (1e-4, 1024)
    assert run.cuda_graph.impl.value == "none" and run.data.source is Source.text
