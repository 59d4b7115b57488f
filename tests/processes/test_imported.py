"""`convert from-hf`: import a model as a checkpoint, resume from it at any layout, export it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from app.choices import Dtype
from app.cli import convert
from app.config import PrecisionConfig, Run
from app.engine.build import build_engine
from app.engine.checkpoint.load import load_checkpoint
from app.engine.export.texts import keep_texts
from app.engine.files.checkpoints import CHECKPOINTS
from app.engine.ranks.groups import create_groups
from app.engine.start.start import find_start
from app.errors import ConfigError
from app.hf import pretrained
from app.planner.plan import Plan
from tests.checkpoints import verify_checkpoint
from tests.config import load
from tests.distributed import run_distributed
from tests.forks import Patches
from tests.hf_folders import edit_config, edit_tensors, save_random, transformers
from tests.processes.hf_export import tensors_of
from tests.processes.init_from import LAYOUTS, first_losses, run_from
from tests.programs import run_forked
from tests.runs import train_steps
from tests.training import ROOT, corpus_in


def losses_after_loading(rank: int, run: Run, path: str) -> list[tuple[float, float]]:
    plan = Plan(run)
    engine = build_engine(plan, create_groups(plan.layout, rank), torch.device("cpu"))
    load_checkpoint(Path(path), verify_checkpoint(Path(path)), engine)
    return train_steps(run, engine, 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout", "params"),
    [
        ("qwen2", "tp2", "float32"),
        ("deepseek_v3", "etp2", "float32"),
        ("mixtral", "ep4", "bfloat16"),
    ],
)
def test_run_resumed_from_import_equals_init_from(
    name: str, layout: str, params: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pretrained, "PART_NUMEL", 500)
    save_random(name, tmp_path / "theirs")
    assert convert.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "run")]) == 0
    run = run_from(tmp_path / "theirs", LAYOUTS[layout])
    run = dataclasses.replace(run, precision=PrecisionConfig(Dtype(params)))
    path = tmp_path / "run" / CHECKPOINTS / "step-00000000"
    resumed = run_distributed(losses_after_loading, run.world_size, run, str(path))
    assert resumed == run_distributed(first_losses, run.world_size, run)
    # any data, lengths and precisions go with it, but no other model
    start = find_start(dataclasses.replace(run, resume=str(path), run_dir=str(tmp_path / "run")))
    told = [change.partition(":")[0] for change in start.changes]
    assert start.checkpoint == path
    assert told == (["model.moe.aux_loss_coeff"] if run.model.moe else [])  # as run_from has it


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "llama-tied", "gpt_oss"])
def test_there_and_back_is_the_same(name: str, tmp_path: Path):
    model, _ = save_random(name, tmp_path / "theirs")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    for line in (["from-hf", "theirs", "run"], ["to-hf", "run", "out"]):
        assert convert.main([line[0], *(str(tmp_path / each) for each in line[1:])]) == 0
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []


def test_nothing_is_left_of_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_random("qwen3", tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(SystemExit):
        convert.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert said.startswith(f"convert: from-hf={tmp_path}/theirs: model.safetensors is truncated")
    assert said.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["theirs"]
    (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit):
        convert.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "run")])
    assert "run: is there already; name a new folder" in capsys.readouterr().err


def stopped(rank: int, arguments: list[str]) -> int:
    """The exit code of a conversion that is interrupted while it reads weights, as from a shell."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(1))

    def interrupted(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with Patches.context() as patch:
        patch.setattr(pretrained.Pretrained, "fill_block", interrupted)
        with pytest.raises(SystemExit) as ended:
            convert.main(arguments)
    return int(str(ended.value.code))


def test_ctrl_c_leaves_nothing(tmp_path: Path):
    save_random("llama", tmp_path / "theirs")
    command = ["from-hf", str(tmp_path / "theirs"), str(tmp_path / "run")]
    assert run_distributed(stopped, 1, command) == [130]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_no_folder_is_left_above_what_fails(tmp_path: Path):
    """A tensor of another shape is found when others have been written."""
    save_random("qwen3", tmp_path / "theirs")
    edit_tensors(tmp_path / "theirs", lambda t: t.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(SystemExit):
        convert.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "new/er/run")])
    assert [each.name for each in tmp_path.iterdir()] == ["theirs"]


def test_commands_accept_imported_run_folder(tmp_path: Path):
    """Three commands: in, trained, out."""
    save_random("mixtral", tmp_path / "theirs")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "theirs")
    config.vocab_size = 264
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "theirs")
    assert convert.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "run")]) == 0
    data = [word for word in corpus_in(tmp_path / "corpus") if not word.startswith("model")]
    words = ["model=pretrained", "model.init_from=run", "resume=run", "train.steps=2"]
    ended = run_forked(tmp_path, [sys.executable, str(ROOT / "train.py"), *data, *words])
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run/checkpoints/step-00000002").is_dir()
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "out")
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert changed and all((before[key] - after[key]).abs().max() < 0.02 for key in changed)
    assert load("model=pretrained", f"model.init_from={tmp_path}/run").model.num_layers == 3


def save_mixed(folder: Path) -> Path:
    """A model in bf16, with a norm and a router in fp32, which are not of bf16 values."""
    model, _ = save_random("qwen3_moe", folder, vocab_size=264)
    model.to(torch.bfloat16).save_pretrained(folder, save_original_format=True)
    edit_tensors(folder, lambda t: t.update({name: torch.rand(t[name].shape) for name in FINE}))
    return folder


FINE = ("model.layers.1.input_layernorm.weight", "model.layers.1.mlp.gate.weight")
FINER = f"{', '.join(FINE)} are float32, and"


def test_every_weight_keeps_the_type_that_it_has(tmp_path: Path):
    """In a checkpoint that no run has trained yet, and out of it again."""
    theirs = save_mixed(tmp_path / "theirs")
    assert convert.main(["from-hf", str(theirs), str(tmp_path / "run")]) == 0
    before = tensors_of(theirs)
    saved = tensors_of(tmp_path / "run" / CHECKPOINTS / "step-00000000")
    assert torch.equal(saved["layers.1.attn_norm.weight.main"], before[FINE[0]])
    assert saved["embedding.main"].dtype == torch.bfloat16
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    after = tensors_of(tmp_path / "out")
    assert {name: value.dtype for name, value in before.items()} == {
        name: value.dtype for name, value in after.items()
    }
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.full
def test_rounded_weights_are_reported(tmp_path: Path):
    """By a run in the type of the others, and by who only asks the model; not in fp32."""
    save_mixed(tmp_path / "theirs")
    edit_config(tmp_path / "theirs", unsloth_fixed=True)
    left = "left out: config.json: unsloth_fixed, which models of type qwen3_moe do not use\n"
    data = [word for word in corpus_in(tmp_path / "corpus") if not word.startswith("model")]
    words = ["model=pretrained", "model.init_from=theirs", "train.steps=1", "optim.lr=1e-3"]
    told = "computed with in precision.params=bfloat16; the optimizer keeps their bits"
    for precision, expected in (
        ("bf16", f"train.py: model.init_from=theirs: {FINER} {told}\n"),
        ("fp32", ""),
    ):
        expected = f"train.py: model.init_from=theirs: {left}{expected}"
        more = [*words, f"precision={precision}", "checkpoint=none"]
        ended = run_forked(tmp_path, [sys.executable, str(ROOT / "train.py"), *data, *more])
        assert (ended.returncode, ended.stderr) == (0, expected)
    ended = run_forked(
        tmp_path,
        [sys.executable, "-m", "app.cli.generate", "theirs", "prompt=a", "max_new_tokens=1"],
    )
    line = f"theirs: {FINER} rounded to the type of the others\n"
    assert ended.returncode == 0 and f"theirs: {left}{line}" in ended.stderr


def test_conversion_reports_omissions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_random("deepseek_v3", tmp_path / "theirs")
    more = {"model.layers.3.eh_proj.weight": torch.ones(2)}
    edit_tensors(tmp_path / "theirs", lambda held: held.update(more))
    edit_config(tmp_path / "theirs", num_nextn_predict_layers=1)
    theirs = str(tmp_path / "theirs")
    assert convert.main(["from-hf", theirs, str(tmp_path / "run")]) == 0
    said = "left out: model.layers.3, which predicts further tokens\n"
    assert capsys.readouterr().err == f"convert: {theirs}: {said}"
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0


def test_what_came_with_a_model_cannot_be_kept_in_one_line(tmp_path: Path):
    save_random("llama", tmp_path / "theirs")
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(ConfigError) as refused:
        keep_texts(run_from(tmp_path / "theirs", {}), tmp_path / "run")
    assert str(refused.value).startswith(f"run_dir={tmp_path}/run: cannot be used: Not a directory")
