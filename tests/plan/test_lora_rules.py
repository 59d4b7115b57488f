"""Rules on adapters, and what plans count of them."""

from __future__ import annotations

import dataclasses

import pytest

from app.cli.options.compose import load_overrides
from app.config import LoraConfig
from app.errors import ConfigError
from app.plan.cost.flops import run_flops_per_token
from app.plan.model.stage import model_weights
from app.plan.sharding.frozen import counts

TINY = ("model=dense_tiny", "lora.rank=8")
REFUSED = {
    "no such layer": (("lora.targets=[q_porj]",), "q_porj is no linear .*did you mean q_proj"),
    "no experts": (("lora.targets=[mlp.experts]",), "mlp.experts is no linear layer of dense_tiny"),
    "rank 0": (("lora.rank=0",), "lora.rank=0: must be at least 1"),
    "no rank": (("lora.rank=null", "lora.targets=[q_proj]"), "has no effect without lora.rank"),
    "frozen": (("train.frozen=[head]",), "adapters alone are trained"),
    "muon": (("optim=muon",), "adapters alone are trained"),
    "fp8": (("precision=bf16", "precision.fp8.recipe=block"), "does not run with adapters"),
    "narrow": (("model=moe_tiny", "lora.rank=3"), "must be a multiple of 4 for experts"),
    "clones": (
        ("model=moe_tiny", "model.moe.dispatcher=static", "model.moe.echo.spares=1",
         "parallel.ep=2", "parallel.dp=2"),
        "copies experts without their adapters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_are_refused(name: str):
    overrides, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        load_overrides([*TINY, *overrides])


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("[q_proj,v_proj]", {"wqkv.q_proj", "wqkv.v_proj"}),
        ("[self_attn]", {"wqkv.q_proj", "wqkv.k_proj", "wqkv.v_proj", "wo.o_proj"}),
        ("[mlp.experts.down_proj]", {"w_down.down_proj"}),
        (
            "[mlp.experts,gate]",
            {"w_up.gate_proj", "w_up.up_proj", "w_down.down_proj", "router.gate"},
        ),
        ("[router]", {"router.gate"}),
        ("[gate_up_proj]", {"w_up.gate_up_proj"}),
    ],
)
def test_targets_are_parts_of_paths(targets: str, names: set[str]):
    run = load_overrides(["model=moe_tiny", "lora.rank=8", f"lora.targets={targets}"], 1)
    found = [each.name for each in model_weights(run.model, run.adapters) if each.adapter]
    assert {name.removesuffix(".a").rpartition(".")[0][-1:] for name in found}
    assert {".".join(name.split(".")[-3:-1]) for name in found} == names


def test_routers_have_adapters_if_named():
    run = load_overrides(["model=moe_tiny", "lora.rank=8"], 1)
    found = [each.name for each in model_weights(run.model, run.adapters) if each.adapter]
    assert found and not any("router" in name for name in found)


def test_flops_of_adapters():
    """Forward and input gradients of the model but for its first GEMMs; adapters three times."""
    run = load_overrides(["model=llama3_8b", "lora.rank=16", "train.seq_len=8192"], 1)
    square, narrow, wide = 4096 + 4096, 4096 + 1024, 4096 + 14336
    trained, _ = counts(run)
    assert trained == 32 * 16 * (2 * square + 2 * narrow + 3 * wide)
    more = run_flops_per_token(dataclasses.replace(run, lora=LoraConfig(rank=32)))
    assert more - run_flops_per_token(run) == pytest.approx(6 * trained, rel=1e-2)
