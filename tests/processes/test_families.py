"""Families train like `transformers` with torch's AdamW; in every layout, in FP8, recomputed and
captured like one plain process.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from app.choices import Fp8Part, Fp8Recipe, Recompute
from app.config import Fp8Config, ModelConfig, OptimConfig, PrecisionConfig, RecomputeConfig, Run
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.hf_folders import FAMILIES as FOLDERS
from tests.hf_folders import save_random
from tests.layouts import LAYOUTS, expect_one_process, layout_run
from tests.parity import few_steps
from tests.processes.captured import WHOLE, local, same, several
from tests.processes.init_from import engine_from, run_from
from tests.rounding import expect_alike, in_fp64, numbered
from tests.runs import TWO_MICROBATCHES, batches_of, make_run, train_steps, whole_parameters
from tests.tensors.hf_parity import CASES
from tests.tensors.hf_weights import converted

BLOCKS = [
    "olmo2",
    "olmo3-yarn",
    "gemma2",
    "gemma3_text",
    "exaone4",
    "cohere2",
    "starcoder2",
    "nemotron",
    "gpt_neox",
    "qwen3_5_text",
]  # unlike Llama's
TABLES = [
    "llama-biases",
    "llama-longrope",
    "llama-dynamic",
    "seed_oss",
    "qwen2_moe",
    "glm4_moe_lite",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe",
    "kimi_k2",
    "granite",
    "phi3-long",
    "granitemoe",
    "qwen3_next",
    "qwen3_5_moe_text",
]
STEPS = 5
OPTIM = OptimConfig(lr=1e-3, warmup_steps=2, eps=1e-5, weight_decay=0.1)

WITH_EXPERTS = {"dp 2 ep 2": ({"dp": 2, "ep": 2}, "auto")}


def fixed_biases(model: ModelConfig) -> ModelConfig:
    """The model with router biases that stay as they are, as in `transformers`: updates are lost
    in rounding.
    """
    if model.moe is None or not model.moe.bias_update_rate:
        return model
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, bias_update_rate=1e-12))


Trained = tuple[list[float], dict[str, torch.Tensor]]  # losses of the steps; weights, our names


def trained_by_transformers(hf: nn.Module, run: Run) -> Trained:
    """Train their model on the same batches."""
    biases = {param for name, param in hf.named_parameters() if name.endswith("bias")}  # of experts
    matrices = [param for param in hf.parameters() if param.dim() > 1 and param not in biases]
    others = [param for param in hf.parameters() if param.dim() == 1 or param in biases]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(
        groups, OPTIM.lr, (OPTIM.beta1, OPTIM.beta2), OPTIM.eps, OPTIM.weight_decay
    )
    losses = []
    for step in range(STEPS):
        batches = batches_of(run, step, 0)
        count = sum(int((batch.labels_BS >= 0).sum()) for batch in batches)
        adam.zero_grad()
        total = 0.0
        for batch in batches:
            logits = hf(input_ids=batch.tokens_BS, use_cache=False).logits
            labels = batch.labels_BS.flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / count
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(hf.parameters(), OPTIM.clip_norm)
        adam.step()
        losses.append(total)
    return losses, converted(hf.state_dict(), run.model)


def ours_trained(rank: int, run: Run) -> Trained:
    engine = engine_from(rank, run)
    losses = [loss for loss, _ in train_steps(run, engine, STEPS)]
    return losses, whole_parameters(engine)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [*BLOCKS, *TABLES, "gpt_oss"])
def test_steps_equal_transformers(name: str, tmp_path: Path):
    hf, _ = save_random(name, tmp_path)
    run = dataclasses.replace(run_from(tmp_path, {}), optim=OPTIM, train=TWO_MICROBATCHES)
    run = dataclasses.replace(run, model=fixed_biases(run.model))
    ((losses, params),) = run_distributed(ours_trained, 1, run)
    with in_fp64():
        exact_losses, exact = trained_by_transformers(copy.deepcopy(hf).double(), run)
    plain_losses, plain = trained_by_transformers(hf, run)
    trained = params.keys() & plain.keys()  # routers' biases stay as they are
    assert len(trained) == len(params)
    found = {weight: params[weight].view_as(plain[weight]) for weight in trained}
    # a loss has the errors of all weights, which by chance may cancel in the one or the other
    expect_alike(
        numbered(losses) | found,
        *(
            numbered(totals) | {weight: held[weight] for weight in trained}
            for totals, held in ((plain_losses, plain), (exact_losses, exact))
        ),
    )


def family_run(
    name: str,
    parallel: dict[str, Any],
    schedule: str = "auto",
    model: ModelConfig | None = None,
    **more: Any,
) -> Run:
    model = model or CASES[FOLDERS[name]]()[2]
    moe = model.moe and dataclasses.replace(model.moe, dense_layers=())
    types = model.layer_types
    both = types[:2] if len(set(types[:2])) > 1 else types[-2:]
    model = dataclasses.replace(model, layer_types=both, moe=moe)
    return layout_run(model, parallel, schedule, **more)


@pytest.mark.full
@pytest.mark.parametrize("layout", [*LAYOUTS, *WITH_EXPERTS])
@pytest.mark.parametrize("name", [*BLOCKS, *TABLES])
def test_layouts_equal_one_process(name: str, layout: str):
    if layout in WITH_EXPERTS and CASES[FOLDERS[name]]()[2].moe is None:
        pytest.skip("has no experts")
    if "cp" in layout and CASES[FOLDERS[name]]()[2].linear_attention is not None:
        pytest.skip("states go from token to token")
    expect_one_process(family_run(name, *(LAYOUTS | WITH_EXPERTS)[layout]))


PHASES = (Recompute.attn_core, Recompute.norm, Recompute.mlp_act)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", chosen([*BLOCKS, *TABLES], BLOCKS))
@pytest.mark.parametrize("parallel", chosen([{}, {"tp": 2}], [{}]), ids=str)
def test_recomputed_and_captured_parts_change_nothing(name: str, parallel: dict[str, Any]):
    plain = family_run(name, parallel)
    again = dataclasses.replace(plain, recompute=RecomputeConfig(phases=PHASES))
    runs = {
        "eager": plain,
        "again": again,
        "captured": dataclasses.replace(plain, cuda_graph=local("partial")),
        "captured again": dataclasses.replace(again, cuda_graph=local("partial")),
    }
    if not parallel and plain.model.moe is None:
        runs["whole"] = dataclasses.replace(plain, cuda_graph=WHOLE)
    for results in run_distributed(several, plain.world_size, runs):
        eager = results.pop("eager")
        for what, result in results.items():
            assert same(result, eager), what


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name", chosen([*BLOCKS, *TABLES, "gpt_oss"], ["gemma2", "gpt_oss", "cohere2"])
)
def test_fp8_trains(name: str):
    """Losses of linear layers and head in FP8 stay near those of fp32, and captured parts change no
    bit.
    """
    _, _, model = CASES[FOLDERS[name]]()
    sizes: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 64}
    if model.mla is None:
        sizes["head_dim"] = 16
    else:
        widths = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
        sizes["mla"] = dataclasses.replace(model.mla, **widths)
    if model.moe is not None:
        sizes["moe"] = dataclasses.replace(model.moe, shared_ffn_hidden_size=32)
    wide = dataclasses.replace(model, **sizes)
    fp8 = Fp8Config(Fp8Recipe.current, include=(Fp8Part.linear, Fp8Part.head))
    runs = [
        make_run(wide, train=TWO_MICROBATCHES, precision=precision)
        for precision in (PrecisionConfig(), PrecisionConfig(fp8=fp8))
    ]
    (plain,), (coarse,) = (run_distributed(few_steps, 1, run, 3) for run in runs)
    for step, loss in plain["losses"].items():
        assert coarse["losses"][step] == pytest.approx(loss, rel=0.02)
        assert coarse["losses"][step] != loss
    eager = family_run(name, {}, model=wide, precision=runs[1].precision)
    captured = dataclasses.replace(eager, cuda_graph=local("partial"))
    (both,) = run_distributed(several, 1, {"eager": eager, "captured": captured})
    assert same(both["captured"], both["eager"])
