"""A run starts from a Hugging Face model, at any layout: its first loss is `transformers`'."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from app.choices import Dtype
from app.config import ModelConfig, MoEConfig, PrecisionConfig, Run
from app.errors import ConfigError
from app.hf import pretrained as hf_pretrained
from app.hf.families import differences
from app.plan.sharding.reshard import Block
from tests.config import load
from tests.distributed import run_distributed
from tests.hf_folders import KEY, edit_tensors, loaded, save_random, their_logits
from tests.processes.init_from import LAYOUTS, engine_from, first_losses, run_from
from tests.programs import run_forked
from tests.runs import batches_of
from tests.training import ROOT


def their_loss(model: torch.nn.Module, run: Run) -> float:
    """Mean over all tokens of the first step."""
    batches = [each for rank in range(run.dp) for each in batches_of(run, 0, rank)]
    tokens = torch.cat([batch.tokens_BS for batch in batches])
    labels = torch.cat([batch.labels_BS for batch in batches])
    logits = their_logits(model, tokens)
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def check_layout(name: str, layout: dict[str, int], folder: Path) -> None:
    theirs, _ = save_random(name, folder)
    run = run_from(folder, layout)
    found = run_distributed(first_losses, run.world_size, run)
    assert all(losses == found[0] for losses in found)
    assert found[0][0][0] == pytest.approx(their_loss(theirs, run), abs=1e-4)
    assert found[0][1][0] < found[0][0][0] + 1  # a step was taken from there


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "tp2"),
        ("qwen2", "tp2"),
        ("olmoe", "etp2"),
        ("gpt_oss", "etp2"),
        ("deepseek_v3", "etp2"),
        ("qwen3_moe", "tp2·pp2·ep2"),
    ],
)
def test_the_first_loss_is_that_of_transformers(name: str, layout: str, tmp_path: Path):
    check_layout(name, LAYOUTS[layout], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["mixtral", "olmoe", "gpt_oss", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
)
def test_the_first_loss_at_every_layout(name: str, layout: str, tmp_path: Path):
    check_layout(name, LAYOUTS[layout], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "llama3.1", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", [{}, {"pp": 2, "vpp": 2}, {"cp": 2}], ids=str)
def test_the_first_loss_of_dense_models(name: str, layout: dict[str, int], tmp_path: Path):
    check_layout(name, layout, tmp_path)


def main_params(rank: int, run: Run) -> list[tuple[str, Block, int, list[float]]]:
    """Return what a rank's optimizer owns: weight, this rank's block, its first element, values."""
    owned = engine_from(rank, run).optimizer.param_shards()
    return [(each.spec.name, each.spec.block, each.start, each.main.tolist()) for each in owned]


@pytest.mark.parametrize(
    ("name", "layout"), [("deepseek_v3", LAYOUTS["etp2"]), ("llama-tied", {"pp": 2, "dp": 2})]
)
def test_the_optimizer_begins_with_the_bits_of_the_file(
    name: str, layout: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """fp32 values that bf16 parameters round: each rank's shard has all their bits."""
    monkeypatch.setattr(hf_pretrained, "PART_NUMEL", 500)
    save_random(name, tmp_path)
    run = dataclasses.replace(run_from(tmp_path, layout), precision=PrecisionConfig(Dtype.bfloat16))
    whole = {
        named.name: values.detach().view(named.weight.shape)
        for named, values in loaded(tmp_path).weights()
    }
    seen = dict.fromkeys(whole, 0)
    for owned in run_distributed(main_params, run.world_size, run):
        for weight, block, first, values in owned:
            box = tuple(map(slice, block.start, block.stop))
            expected = whole[weight][box].flatten()[first : first + len(values)]
            assert torch.equal(torch.tensor(values), expected), weight
            seen[weight] += len(values)
    assert [weight for weight, values in whole.items() if seen[weight] < values.numel()] == []


def broken_start(rank: int, run: Run) -> str:
    try:
        first_losses(rank, run)
    except ConfigError as error:
        return str(error)
    return "started"


def test_a_fault_that_one_rank_finds_ends_all_with_its_line(tmp_path: Path):
    save_random("llama", tmp_path)
    run = run_from(tmp_path, {"pp": 2})

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.2.mlp.up_proj.weight"
        tensors[name] = tensors[name][:-1].clone()

    edit_tensors(tmp_path, cut)
    fault = "model.safetensors: model.layers.2.mlp.up_proj.weight has the shape [55, 32]"
    expected = f"{KEY}={tmp_path}: {fault} instead of [56, 32]"
    assert run_distributed(broken_start, 2, run) == [expected] * 2


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_the_preset_takes_all_sizes_from_the_file(name: str, tmp_path: Path):
    _, ours = save_random(name, tmp_path)
    run = load("model=pretrained", f"model.init_from={tmp_path}", "model.init_std=0.5")
    assert list(differences(run.model, ours)) == []
    assert (run.model.init_std, run.model.init_from) == (0.5, str(tmp_path))


MISTAKES = {
    ("model=pretrained",): "model.init_from=null: model=pretrained leaves sizes to the config.json "
    "of a Hugging Face model; name its folder, or its name on the hub",
    ("model.init_from={}",): "model.num_layers=4: {} has 3 in its config.json; did you mean 3 or "
    "model=pretrained?",
    ("model=pretrained", "model.init_from={}", "model.rope_theta=7"): "model.rope_theta=7.0: {} "
    "has 1000.0 in its config.json; did you mean 1000.0 or model=pretrained?",
    ("model=pretrained", "model.init_from={}", "model.moe.bias_update_rate=0"): "model.moe."
    "bias_update_rate=0.0: would leave out the biases that the routers of {} have learnt; did you "
    "mean 0.001?",
    ("model=pretrained", "model.init_from={}x"): "model.init_from={}x: no such folder; did you "
    "mean {}?",
}


@pytest.mark.parametrize("typed", MISTAKES, ids=" ".join)
def test_what_contradicts_the_file_is_named(typed: tuple[str, ...], tmp_path: Path):
    folder = tmp_path / "model"
    save_random("deepseek_v3", folder)
    with pytest.raises(ConfigError) as refused:
        load(*(each.format(folder) for each in typed))
    assert str(refused.value) == MISTAKES[typed].format(*[folder] * 2)


def test_every_size_is_left_to_the_file():
    """A new key of the architecture is in the preset too, or has no place there."""
    from app.cli.options.pretrained import OF_KINDS
    from app.hf.families import ARCHITECTURE, OF_EXPERTS
    from tests.config import CONF

    left = (CONF / "model/pretrained.yaml").read_text()
    missing = {name for name in ARCHITECTURE if f"{name}: ${{config_json:{name}}}" not in left}
    assert missing == {*OF_KINDS, "mtp"}  # how many of those layers are read is the user's choice
    assert [n for n in OF_EXPERTS if f"  {n}: ${{config_json:moe.{n}}}" not in left] == []
    assert isinstance(ModelConfig().num_layers, int)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_configuration_is_shown_with_the_sizes_of_the_file(name: str, tmp_path: Path):
    _, ours = save_random(name, tmp_path / "theirs")
    line = [sys.executable, str(ROOT / "train.py"), "--cfg", "job", "--resolve", "model=pretrained"]
    shown = run_forked(tmp_path, [*line, "model.init_from=theirs"])
    assert (shown.returncode, shown.stderr) == (0, "")
    model = OmegaConf.to_container(OmegaConf.create(shown.stdout))["model"]
    assert model["num_layers"] == ours.num_layers and model["rope_theta"] == ours.rope_theta
    assert model["moe"]["num_experts"] == (ours.moe or MoEConfig()).num_experts
    told = run_forked(tmp_path, line)
    assert (told.returncode, told.stderr) == (2, f"train.py: {MISTAKES[('model=pretrained',)]}\n")
