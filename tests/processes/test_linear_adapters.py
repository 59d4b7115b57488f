"""Adapters of linear attention: their names, and steps beside `peft`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.config import LoraConfig, ParallelConfig
from app.engine.export.export import export_adapter
from app.engine.files.checkpoints import checkpoint_name
from app.hf.adapter import _adapter_config
from app.hf.adapter_names import AdapterNames
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.hf_folders import save_random, their_logits, transformers
from tests.layouts import LAYOUTS, expect_one_process, layout_run
from tests.processes import test_adapter_files
from tests.processes.test_adapter_files import (
    LORA,
    OF_PEFT,
    check_steps_and_files,
    run_from,
    tokens_of,
    tuned,
    with_adapter,
)
from tests.processes.test_documents import MODELS
from tests.tensors.hf_parity import CASES

KINDS = {"qwen3_next": "qwen3-next", "qwen3_5_text": "qwen3-5", "qwen3_5_moe_text": "qwen3-5-moe"}
ATTENTION = LoraConfig(rank=4, targets=("self_attn", "linear_attn"))
PROJECTIONS = {
    "qwen3_next": {"in_proj_qkvz": 2, "out_proj": 1},
    "qwen3_5_text": {"in_proj_qkv": 1, "in_proj_z": 1, "out_proj": 1},
}
PROJECTIONS["qwen3_5_moe_text"] = PROJECTIONS["qwen3_5_text"]
GATED = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_linear_attention_is_adapted_by_peft_names(kind: str, tmp_path: Path):
    """Those of the files that a run started from: other types compute the same."""
    _, theirs, model = CASES[KINDS[kind]]()
    theirs.save_pretrained(tmp_path)
    model = replace(model, init_from=str(tmp_path))
    names = AdapterNames.of(model, ATTENTION, "lora.rank", 4)
    assert names.family.model_type == kind
    specs = enumerate(spec.attention for spec in model.layer_specs)
    assert names.layers_in() == {
        f"model.layers.{index}.{module}.{name}": count
        for index, spec in specs
        for module, linears in (
            [("self_attn", GATED)] if spec.linear is None else [("linear_attn", PROJECTIONS[kind])]
        )
        for name, count in linears.items()
    }


def test_joined_projections_have_ranks_of_their_own():
    """`peft` finds experts as parameters, which its patterns of ranks leave out."""
    _, _, model = CASES["qwen3-next"]()
    lora = replace(ATTENTION, targets=(*ATTENTION.targets, "mlp"))
    names = AdapterNames.of(model, lora, "lora.rank", 4)
    config = _adapter_config(names)
    assert config["r"] == 4 and config["target_parameters"]
    assert config["rank_pattern"] == {"linear_attn.in_proj_qkvz": 8}


@pytest.mark.parametrize(
    "name", chosen({name: name for name in LAYOUTS if "cp" not in name}, ["tp 2"])
)
def test_layouts_train_linear_adapters_like_one_process(name: str):
    model = replace(MODELS["linear"], attention_gate=True)
    expect_one_process(layout_run(model, *LAYOUTS[name], lora=ATTENTION))


@pytest.mark.full
@OF_PEFT
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_steps_of_linear_adapters_are_those_of_peft(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two steps: in further ones rounding of both grows beyond the bounds."""
    monkeypatch.setattr(test_adapter_files, "STEPS", 2)
    check_steps_and_files(tmp_path, kind, ATTENTION.targets if kind == "qwen3_next" else ())


@pytest.mark.full
@OF_PEFT
def test_peft_loads_linear_attention_beside_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And continues from B of zeros as the model that it is beside."""
    monkeypatch.setattr(test_adapter_files, "STEPS", 1)
    save_random("qwen3_next", tmp_path / "base")
    targets = (*ATTENTION.targets, "mlp")
    run = run_from(tmp_path / "base", ParallelConfig(), replace(LORA, targets=targets))
    run_distributed(tuned, 1, run, tmp_path)
    export_adapter(tmp_path / "checkpoints" / checkpoint_name(0), tmp_path / "out", "to-peft")
    model = with_adapter(tmp_path / "base", tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager", experts_implementation="eager"
    )
    tokens = tokens_of(run)
    torch.testing.assert_close(model(tokens).logits, their_logits(plain.eval(), tokens))
