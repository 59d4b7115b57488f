"""GPT-OSS trains as `transformers` does, like one process in every kind of layout, and the same bit
for bit whatever backward computes again and graphs hold.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from app.choices import CpComm, DispatcherKind, Dtype, Fp8Part, Fp8Recipe, Recompute
from app.config import Fp8Config, MoEConfig, PrecisionConfig, Run
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.hf_folders import save_random
from tests.layouts import expect_one_process, layout_run
from tests.processes.captured import WHOLE, local, same, several
from tests.processes.init_from import engine_from, run_from
from tests.runs import STEADY, TINY, batches_of, train_steps

pytest.importorskip("transformers")
STEPS = 5
MOE = MoEConfig(
    num_experts=8,
    top_k=3,
    ffn_hidden_size=16,
    expert_bias=True,
    logit_bias=True,
    swiglu_limit=0.5,
)
MODEL = dataclasses.replace(
    TINY, qkv_bias=True, attn_out_bias=True, sinks=True, sliding_window=5, moe=MOE, init_std=0.1
)
PARTS = Fp8Part.linear, Fp8Part.experts
FP8 = PrecisionConfig(Dtype.bfloat16, fp8=Fp8Config(Fp8Recipe.current, include=PARTS))
STATIC = dataclasses.replace(MODEL, moe=dataclasses.replace(MOE, dispatcher=DispatcherKind.static))
GATHERED = dataclasses.replace(
    MODEL, moe=dataclasses.replace(MOE, dispatcher=DispatcherKind.all_gather)
)
LAYOUTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "tp 2": (MODEL, {"tp": 2, "etp": 1}, "auto"),
    "ep 2": (MODEL, {"ep": 2, "dp": 2}, "auto"),
    "etp 2": (MODEL, {"etp": 2, "dp": 2}, "auto"),
    "tp 2 ep 2 etp 2": (MODEL, {"tp": 2, "ep": 2, "etp": 2, "dp": 2}, "auto"),
    "pp 2 split backward": (MODEL, {"pp": 2}, "zero_bubble_h1"),
    "cp 2": (MODEL, {"cp": 2}, "auto"),
    "cp 2 heads": (MODEL, {"cp": 2, "cp_comm_type": CpComm.all_to_all}, "auto"),
    "static ep 2": (STATIC, {"ep": 2, "dp": 2}, "auto"),
    "static etp 2": (STATIC, {"etp": 2, "dp": 2}, "auto"),
    "gathered ep 2": (GATHERED, {"ep": 2, "dp": 2}, "auto"),
}


def five_losses(rank: int, run: Run) -> list[float]:
    return [loss for loss, _ in train_steps(run, engine_from(rank, run), STEPS)]


def test_five_steps_are_those_of_transformers(tmp_path: Path):
    """With torch's AdamW, which decays matrices: no sinks, norms or biases, of experts either."""
    theirs, _ = save_random("gpt_oss", tmp_path)
    run = dataclasses.replace(run_from(tmp_path, {}), optim=STEADY)
    (found,) = run_distributed(five_losses, 1, run)
    optim = run.optim
    plain = [each for name, each in theirs.named_parameters() if decays(name, each)]
    other = [each for name, each in theirs.named_parameters() if not decays(name, each)]
    groups = [{"params": plain}, {"params": other, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(
        groups,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    expected = []
    for step in range(STEPS):
        batches = batches_of(run, step, 0)
        tokens = torch.cat([batch.tokens_BS for batch in batches])
        labels = torch.cat([batch.labels_BS for batch in batches])
        logits = theirs(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), optim.clip_norm)
        adam.step()
        expected.append(float(loss.detach()))
    assert found == pytest.approx(expected, rel=2e-5)


def decays(name: str, param: torch.Tensor) -> bool:
    return param.dim() > 1 and not name.endswith("bias")


@pytest.mark.parametrize("case", chosen(list(LAYOUTS), ["tp 2 ep 2 etp 2"]))
def test_gpt_oss_trains_alike_in_every_layout(case: str):
    model, parallel, schedule = LAYOUTS[case]
    expect_one_process(layout_run(model, parallel, schedule))


@pytest.mark.parametrize("name", chosen(["own", "static", "FP8"], ["static"]))
def test_graphs_and_recompute_change_no_bit_of_gpt_oss(name: str):
    model = MODEL if name == "own" else STATIC
    precision = {"precision": FP8} if name == "FP8" else {}
    plain = layout_run(model, {}, **precision)
    runs = {
        "eager": plain,
        "activation again": layout_run(model, {}, phases=(Recompute.experts_act,), **precision),
        "all again": layout_run(
            model, {}, phases=(Recompute.moe, Recompute.attn_core), **precision
        ),
        "captured": dataclasses.replace(plain, cuda_graph=local("router")),
    }
    if model is STATIC:
        runs["whole"] = dataclasses.replace(plain, cuda_graph=WHOLE)
    for results in run_distributed(several, 1, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name
