"""The option surface: what exists, that every option composes, and what a mistake is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from app.cli.compose import all_keys, load_run, register_schema
from app.cli.messages import readable_errors
from app.config import Run
from app.errors import ConfigError
from app.rules import check_runnable

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())
NEEDS = {
    "data=text": ["data.path=[x]"],
    "data=jsonl": ["data.path=[x]"],
    "data=parquet": ["data.path=[x]"],
    "data=hub": ["data.name=x"],
    "schedule=interleaved": ["parallel.pp=2", "parallel.vpp=2"],
    "schedule=zero_bubble_v": ["parallel.pp=2", "parallel.vpp=2"],
}


def load(*overrides: str, world_size: int | None = None) -> Run:
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load_run(compose("train", list(overrides)), world_size)


def message(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The one line that a mistake is told."""
    with pytest.raises(SystemExit) as exit_code, readable_errors("train.py", speak=True):
        load(*overrides)
    out, err = capsys.readouterr()
    assert exit_code.value.code == 2 and out == "" and err.count("\n") == 1
    return err.strip().removeprefix("train.py: ")


def test_option_surface_is_a_decision():
    """A new key changes this list in the same commit: tests/golden/options.txt."""
    assert all_keys() == (ROOT / "tests/golden/options.txt").read_text().split()


@pytest.mark.parametrize("choice", [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))])
def test_every_option_composes(choice: str):
    prefix = "+" if choice.startswith("experiment") else ""
    run = load(prefix + choice, *NEEDS.get(choice, []))
    group, option = choice.split("=")
    if group == "model":
        assert run.model.name == option


def test_defaults_are_frozen_and_typed():
    run = load()
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.model.num_layers = 3  # type: ignore[misc]
    assert (run.model.name, run.dp, run.world_size) == ("moe_tiny", 1, 1)


def test_one_file_needs_no_list():
    assert load("data=text", "data.path=a.txt").data.path == ("a.txt",)


def test_yaml_and_dataclass_defaults_agree():
    """So that app/config tells the truth; the model's sizes are the option's."""
    run = load()
    for section in (
        "parallel",
        "hardware",
        "schedule",
        "recompute",
        "cuda_graph",
        "precision",
        "optim",
        "data",
        "checkpoint",
        "log",
        "loss",
        "train",
    ):
        assert getattr(run, section) == type(getattr(run, section))(), section


def test_launcher_decides_the_world():
    assert load("parallel.ep=2", world_size=2).dp == 2
    assert load("parallel.dp=2").world_size == 2


# Overrides -> the whole message.
MISTAKES = {
    "model=moe_tinny": "model=moe_tinny: the options are deepseek_v3_like, dense_tiny, llama3_8b, mixtral_8x7b, moe_tiny, "
    "qwen3_30b_a3b, small, smallmoe; nearest that works: moe_tiny",
    "modle=x": "modle=x: there is no such key; nearest that works: model",
    "model.num_layer=4": "model.num_layer=4: there is no such key; nearest that works: model.num_layers",
    "+model.moe.topk=4": "model.moe.topk=4: there is no such key; nearest that works: model.moe.top_k",
    "train.steps=abc": "train.steps=abc: must be a whole number; nearest that works: 700",
    "train.steps=1.5": "train.steps=1.5: must be a whole number; nearest that works: 2",
    "train.steps=0": "train.steps=0: must be at least 1; nearest that works: 1",
    "optim.lr=1e-3x": "optim.lr=1e-3x: must be a number; nearest that works: 0.001",
    "optim.lr=-1": "optim.lr=-1.0: must be above 0; nearest that works: 0.003",
    "model.moe.first_k_dense=9": "model.moe.first_k_dense=9: leaves none of the 4 layers for experts; nearest that works: 3",
    "optim.decay=cosin": "optim.decay=cosin: must be one of constant, linear, cosine, inverse_square_root, wsd; nearest that works: cosine",
    "optim.min_lr=1": "optim.min_lr=1.0: above the peak optim.lr=0.003; nearest that works: 0.003",
    "optim.warmup_steps=1000": "optim.warmup_steps=1000: must be below the 700 decay steps; nearest that works: 70",
    "model.moe.top_k=100": "model.moe.top_k=100: only num_experts=8 to choose from; nearest that works: 8",
    "parallel.ep=3": "parallel.ep=3: must divide model.moe.num_experts=8; nearest that works: 2 or 4",
    "parallel.ep=2": "parallel.ep=2: must divide the world size 1; nearest that works: 1, or parallel.dp=2",
    "model.num_heads=3": "model.num_heads=3: must divide hidden_size=128 unless head_dim is set; nearest that works: 2 or 4",
    "model.num_kv_heads=3": "model.num_kv_heads=3: must divide num_heads=4; nearest that works: 2 or 4",
    "train.global_batch=10 train.micro_batch=8": (
        "train.global_batch=10: must be a multiple of micro_batch × dp = 8 × 1 = 8; nearest that works: 8 or 16"
    ),
    "model.moe.ffn_hidden_size=6": "model.moe.ffn_hidden_size=6: experts in float32 need a multiple of 4; nearest that works: 4 or 8",
    "data=text": "data.path=: data=text needs files or globs; nearest that works: data.path='folder/*'",
    "data=text data.path=[3]": "data.path=[3]: must be a file or glob, or a list of them; nearest that works: data.path='folder/*'",
    "log.console=yess": "log.console=yess: must be true or false; nearest that works: true",
    "model=dense_tiny model.moe.top_k=1": (
        "an override reaches into a section that is null; a dense model has no model.moe: choose a model with experts"
    ),
    "parallel.tp=2 parallel.world_size=3": "parallel.world_size=3: must be a multiple of tp × cp × pp = 2 × 1 × 1 = 2; nearest that works: 2 or 4",
    "parallel.tp=2 parallel.world_size=8 parallel.dp=3": "parallel.dp=3: 8 processes over tp × cp × pp = 2 ranks; nearest that works: 4",
    "parallel.tp=4": "parallel.tp=4: must divide model.num_kv_heads=2; nearest that works: 2",
    "model.vocab_size=265 parallel.tp=2": "model.vocab_size=265: must be a multiple of parallel.tp=2; nearest that works: 264 or 266",
    "parallel.cp=3": "train.seq_len=128: must be a multiple of 2·cp = 6; nearest that works: 126 or 132",
    "parallel.etp=5": "parallel.etp=5: must divide the 1 ranks of a pipeline stage; nearest that works: 1",
    "model=dense_tiny parallel.etp=1": "parallel.etp=1: model=dense_tiny has no experts; nearest that works: null",
    "parallel.ep=4 parallel.pp=2 parallel.dp=2": (
        "parallel.ep=4: must divide the 2 ranks of a pipeline stage; nearest that works: 2, or parallel.dp=8"
    ),
    "parallel.order=tp-tp-dp": (
        "parallel.order=tp-tp-dp: must list each of tp, cp, ep, dp, pp at most once, joined by '-'; nearest that works: tp-dp"
    ),
    "parallel.pp=3": (
        "model.num_layers=4: 4 layers do not divide over pp × vpp = 3 × 1 = 3 stages; nearest that works: 3 or 6 layers, or 2 or 4 stages"
    ),
    "parallel.pp=2 schedule=none": (
        "schedule.name=none: runs on one pipeline rank, not on pp=2; nearest that works: auto, 1f1b or interleaved"
    ),
    "parallel.pp=2 parallel.vpp=2 schedule=1f1b": (
        "schedule.name=1f1b: has one stage per rank, not vpp=2; nearest that works: interleaved"
    ),
    "parallel.pp=2 schedule=interleaved": (
        "parallel.vpp=1: schedule interleaved needs several stages per rank; nearest that works: 2, or schedule=1f1b"
    ),
    "parallel.pp=2 schedule.group_size=4": (
        "schedule.group_size=4: schedule 1f1b has no groups; nearest that works: null, or interleaved"
    ),
    "parallel.pp=2 parallel.vpp=2 train.micro_batch=16": (
        "train.global_batch=16: too few microbatches of 16 for dp=1: 1, but interleaved needs pp=2 or more; "
        "nearest that works: 32, or schedule=1f1b with vpp=1"
    ),
    "parallel.pp=2 parallel.vpp=2 schedule.group_size=3": (
        "schedule.group_size=3: groups of 3 (null: pp) out of 2 microbatches must be between pp=2 and 2, the last one too; "
        "nearest that works: 2"
    ),
    "cuda_graph.scope=[attn]": "cuda_graph.scope=[attn]: impl=none has no parts of layers; nearest that works: [], or impl=local",
    "cuda_graph.impl=local cuda_graph.scope=[attn,moe_preprocess]": (
        "cuda_graph.scope=[attn, moe_preprocess]: moe_preprocess follows moe_router, so it needs that; "
        "nearest that works: [attn, moe_router, moe_preprocess]"
    ),
    "cuda_graph=full_iteration parallel.ep=2 parallel.dp=2": (
        "cuda_graph.impl=full_iteration: captures the exchange of tokens, for whose sizes the host waits with ep=2; "
        "nearest that works: scope=[attn, moe_router, moe_preprocess] with impl=local"
    ),
    "recompute.partial_microbatches=2": (
        "recompute.partial_microbatches=2: lets some microbatches keep more than recompute.full does, so it needs that; "
        "nearest that works: 0"
    ),
    "recompute.phases=[nrm]": (
        "recompute.phases=nrm: must be one of attn_core, norm, mlp_act, experts_act, shared, moe; nearest that works: norm"
    ),
    "schedule.name=1f2b": (
        "schedule.name=1f2b: must be one of auto, none, gpipe, 1f1b, interleaved, zero_bubble_h1, zero_bubble_v; nearest that works: 1f1b"
    ),
    "model=dense_tiny parallel.dp=2 parallel.ep=2": "parallel.ep=2: model=dense_tiny has no experts; nearest that works: 1",
    "a b": "Error parsing override 'a' missing EQUAL at '<EOF>' See https://hydra.cc/docs/1.2/advanced/override_grammar/basic for details",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_mistake_is_told_in_one_line(overrides: str, capsys: pytest.CaptureFixture[str]):
    assert message(capsys, *overrides.split()) == MISTAKES[overrides]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit), readable_errors("train.py", speak=False):
        load("train.steps=0")
    assert capsys.readouterr() == ("", "")


def test_every_key_has_its_unit_in_a_comment():
    lines = [line for path in sorted((ROOT / "app/config").glob("*.py")) for line in path.read_text().splitlines()]
    fields = [
        line
        for line in lines
        if line.startswith("    ") and not line.startswith("     ") and ": " in line and " = " in line and "def " not in line
    ]
    sections = ("Config()", "Enum", "self.")
    silent = [line for line in fields if "#" not in line and not any(word in line for word in sections)]
    single = [
        line for line in silent if not line.strip().startswith(("name: ScheduleName", "impl: GraphImpl", "normalize:", "device:"))
    ]
    assert single == [] and len(fields) > 60


def test_options_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for group in GROUPS:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{group}` |"))
        listed = {word for word in row.split("|")[2].replace("`", " ").split()}
        assert listed == {path.stem for path in (CONF / group).glob("*.yaml")}, group


def test_what_is_only_planned_is_refused_by_training():
    run = load("cuda_graph=attn", "cuda_graph.impl=transformer_engine")
    with pytest.raises(ConfigError, match=r"can be planned \(python -m app.cli.plan\), but training does not do it yet"):
        check_runnable(run)
    for option in ("none", "attn", "partial", "full_iteration"):
        run = load(f"cuda_graph={option}")
        assert check_runnable(run) == run


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("MY_API_KEY", "log.project=${oc.env:MY_API_KEY}"),
        ("HF_TOKEN", "data.path=[x,https://user:${oc.env:HF_TOKEN,none}@host/*.txt]"),
        ("DB_PASSWORD", "log.group='${oc.decode:${oc.env:DB_PASSWORD}}'"),
        ("AWS_SECRET_ACCESS_KEY", "model.name=${oc.env:AWS_SECRET_ACCESS_KEY}"),
    ],
)
def test_secrets_are_not_written(monkeypatch: pytest.MonkeyPatch, name: str, override: str):
    """What a run is given stands in its config.yaml, plan.json and checkpoints."""
    monkeypatch.setenv(name, "12345")
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=f"what {name} holds would be written") as refused:
        load("data=text", "data.path=[x]", override)
    assert refused.value.key == key and "12345" not in str(refused.value)


def test_other_variables_are_taken(monkeypatch: pytest.MonkeyPatch):
    for name in ("HOME_DIR", "TOKENIZER_DIR", "MONKEY_BUSINESS"):
        monkeypatch.setenv(name, "there")
        assert load(f"data.tokenizer='${{oc.env:{name}}}/t.json'").data.tokenizer == "there/t.json"
