"""Exports of models trained at any layout load in `transformers` and compute the same."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from app.choices import Dtype
from app.cli import convert
from app.config import PrecisionConfig, Run
from app.engine.export.export import Exported, export_checkpoint
from app.engine.files.checkpoints import read_manifest
from app.errors import ConfigError
from app.hf import write
from tests.distributed import run_distributed
from tests.hf_folders import (
    edit_config,
    loaded,
    save_byte_level,
    save_random,
    their_logits,
    transformers,
)
from tests.processes.hf_export import DENSE, a_checkpoint, exported_together, saved, tensors_of
from tests.processes.init_from import LAYOUTS, run_from
from tests.programs import run_forked
from tests.runs import TINY, make_run, with_model
from tests.tensors.models import draw_tokens, forward
from tests.training import ROOT, corpus_in

BF16 = PrecisionConfig(Dtype.bfloat16)


def check_round_trip(
    name: str,
    there: dict[str, int],
    back: dict[str, int],
    folder: Path,
    precision: PrecisionConfig | None = None,
) -> None:
    """In at one layout, saved, loaded at another, saved, out: bit for bit what it was."""
    model, _ = save_random(name, folder / "theirs")
    if precision is not None:
        model.to(torch.bfloat16).save_pretrained(folder / "theirs")
    sections = {} if precision is None else {"precision": precision}
    run = dataclasses.replace(run_from(folder / "theirs", there), **sections)
    (first, *_) = run_distributed(saved, run.world_size, run, folder / "one")
    run = dataclasses.replace(run_from(folder / "theirs", back), **sections)
    (second, *_) = run_distributed(saved, run.world_size, run, folder / "two", first)
    before = tensors_of(folder / "theirs")
    for checkpoint, out in ((first, folder / "first"), (second, folder / "second")):
        export_checkpoint(Path(checkpoint), out, "to-hf")
        after = tensors_of(out)
        assert before.keys() == after.keys()
        unlike = [key for key, value in before.items() if not torch.equal(value, after[key])]
        assert unlike == []
        assert {key for key in before if before[key].dtype != after[key].dtype} == set()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        ("llama-tied", {"tp": 2}, {"pp": 2, "vpp": 2}),
        ("deepseek_v3", LAYOUTS["etp2"], {}),
        ("gpt_oss", LAYOUTS["etp2"], {"tp": 2}),
        ("granitemoe", LAYOUTS["etp2"], {"tp": 2}),
        ("glm4_moe", LAYOUTS["etp2"], {"pp": 2}),
        ("minimax_m2", {"tp": 2}, LAYOUTS["etp2"]),
        ("ernie4_5_moe-no-shared", LAYOUTS["etp2"], {"tp": 2}),
    ],
)
def test_out_is_what_came_in(name: str, there: Any, back: Any, tmp_path: Path):
    check_round_trip(name, there, back, tmp_path)


@pytest.mark.full
def test_bf16_comes_out_as_it_came_in(tmp_path: Path):
    check_round_trip("qwen3_moe", LAYOUTS["ep4"], LAYOUTS["tp2·pp2·ep2"], tmp_path, BF16)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["mixtral", "olmoe", "gpt_oss", "granitemoe", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
)
def test_every_layout_gives_out_what_came_in(name: str, layout: str, tmp_path: Path):
    names = list(LAYOUTS)
    other = names[(names.index(layout) + 1) % len(names)]
    check_round_trip(name, LAYOUTS[layout], LAYOUTS[other], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-tied",
        "qwen2",
        "qwen3",
        "granite",
        "phi3",
        "starcoder2",
        "nemotron",
        "gpt_neox",
        "deepseek_v2-lite",
        "qwen3_next",
        "qwen3_5_text-tied",
        "qwen3_5_moe_text",
    ],
)
def test_every_family_gives_out_what_came_in(name: str, tmp_path: Path):
    check_round_trip(name, {"pp": 2}, {"pp": 2, "vpp": 2}, tmp_path)


MIXTRAL = with_model(
    make_run(), moe=dataclasses.replace(TINY.moe, shared_ffn_hidden_size=0, first_k_dense=0)
)


@pytest.mark.every(2)
@pytest.mark.parametrize("run", [DENSE, MIXTRAL], ids=["dense", "experts"])
@torch.no_grad()
def test_transformers_continues_a_text_as_we_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A model that began here, after two steps on two ranks that wrote a file each."""
    monkeypatch.setattr(write, "FILE_BYTES", 10_000)
    parallel = dataclasses.replace(run.parallel, dp=2)
    run = dataclasses.replace(run, parallel=parallel)
    run_distributed(exported_together, 2, run, tmp_path)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = loaded(tmp_path / "out")
    tokens = draw_tokens(ours.model, 2, 9)
    torch.testing.assert_close(
        forward(ours, tokens).x, their_logits(theirs, tokens), atol=1e-4, rtol=1e-4
    )
    text = tokens[:1]
    for _ in range(8):
        text = torch.cat((text, forward(ours, text).x[:, -1:].argmax(-1)), dim=1)
    given = {"attention_mask": torch.ones_like(tokens[:1]), "pad_token_id": 0, "eos_token_id": -1}
    greedy = theirs.generate(tokens[:1], max_new_tokens=8, do_sample=False, **given)
    assert greedy.tolist() == text.tolist()


def test_parts_of_tensors_are_written_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every tensor is made larger than one part."""
    save_random("qwen3_moe", tmp_path / "theirs")
    run = run_from(tmp_path / "theirs", LAYOUTS["etp2"])
    path, *_ = run_distributed(saved, run.world_size, run, tmp_path)
    largest = 0
    plain = write.WrittenTensor.data

    def seen(tensor: write.WrittenTensor, source: write.WeightReader) -> Any:
        nonlocal largest
        for data in plain(tensor, source):
            largest = max(largest, len(data))
            yield data

    monkeypatch.setattr(write.WrittenTensor, "data", seen)
    monkeypatch.setattr(write, "PART_NUMEL", 100)
    export_checkpoint(Path(path), tmp_path / "out", "to-hf")
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "out")
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    assert largest == 4 * 2 * 16 * 32  # the queries of a key/value head, which are one part


def test_what_came_with_the_model_goes_with_it(tmp_path: Path):
    theirs = tmp_path / "theirs"
    save_random("llama", theirs)
    edit_config(theirs, auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    settings = '{"eos_token": "<|endoftext|>", "chat_template": "{{ z }}"}'
    texts = {
        "tokenizer_config.json": settings,
        "merges.txt": "a b",
        "chat_template.jinja": "{{ x }}",
        "additional_chat_templates/tool_use.jinja": "{{ y }}",
    }
    (theirs / "additional_chat_templates").mkdir()
    save_byte_level(theirs / "tokenizer.json")
    for name, text in {**texts, "modeling.py": "boom()", "notes.bin": "x"}.items():
        (theirs / name).write_text(text)
    run = run_from(theirs, {})
    data = dataclasses.replace(run.data, tokenizer=str(theirs / "tokenizer.json"))
    run = dataclasses.replace(run, data=data)
    (path,) = run_distributed(saved, 1, run, tmp_path / "run")
    export_checkpoint(Path(path), tmp_path / "out", "to-hf")
    out = tmp_path / "out"
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    ours = {"config.json", "model.safetensors"}
    assert written == {*texts, *ours, "generation_config.json", "tokenizer.json"}
    for name, text in texts.items():
        assert (tmp_path / "out" / name).read_text() == text
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (theirs, tmp_path / "out")
    )
    assert before.pop("auto_map")  # to code, which is not copied
    assert before.pop("dtype") == after.pop("torch_dtype") == "float32"
    assert before == after


def test_export_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = a_checkpoint(tmp_path / "run", DENSE)
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    said = f"{path}: a model of type llama is now in {tmp_path}/out\n"
    assert capsys.readouterr().out == said
    assert convert.main(["--help"]) == 0


def test_export_refuses_unknown_family_before_writing(tmp_path: Path):
    path = a_checkpoint(tmp_path / "run", make_run())
    with pytest.raises(ConfigError, match="no supported Hugging Face family computes the same"):
        export_checkpoint(path, tmp_path / "out", "to-hf")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run"]


def test_the_model_of_a_manifest_is_the_run_s(tmp_path: Path):
    for run in (make_run(), run_from_deepseek(tmp_path)):
        path = a_checkpoint(tmp_path / run.model.name, run)
        manifest = read_manifest(path)
        assert Exported(path, manifest, "to-hf", tmp_path).model == run.model


def run_from_deepseek(folder: Path) -> Run:
    save_random("deepseek_v3", folder / "theirs")
    return run_from(folder / "theirs", {})


def test_a_run_from_a_model_to_a_model_and_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Start from a folder and export at the end; a resumed run exports its own end."""
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "theirs"
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=264,
        )
    )
    model.save_pretrained(theirs)
    data = corpus_in(tmp_path / "corpus")
    words = ("model=pretrained", "model.init_from=theirs", "checkpoint.export_hf=true")
    kept = [word for word in data if not word.startswith("model")]
    weights = []
    for more in (["train.steps=2"], ["train.steps=4", "resume=auto"]):
        typed = [*kept, *words, "checkpoint.interval=1", "run_dir=run", *more]
        ended = run_forked(tmp_path, [sys.executable, str(ROOT / "train.py"), *typed])
        assert ended.returncode == 0, ended.stderr
        weights.append(tensors_of(tmp_path / "run/hugging_face"))
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/hugging_face")
    before = tensors_of(theirs)
    assert before.keys() == weights[0].keys() == weights[1].keys()
    name = "model.layers.1.mlp.up_proj.weight"
    versions = [each[name] for each in (before, *weights)]
    assert not torch.equal(versions[0], versions[1]) and not torch.equal(versions[1], versions[2])
    assert (versions[0] - versions[1]).abs().max() < 0.01  # two steps from there
    # where the run began is no longer needed
    theirs.rename(tmp_path / "gone")
    assert convert.main(["to-hf", "run", "out"]) == 0
    after = tensors_of(tmp_path / "out")
    assert [name for name, value in weights[1].items() if not torch.equal(value, after[name])] == []
