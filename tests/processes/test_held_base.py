"""Frozen linear layers in fewer bits beside adapters: values, layouts, memory and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from app.choices import BaseKind, GraphImpl, ScheduleName
from app.config import (
    CheckpointConfig,
    CudaGraphConfig,
    LoraConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.engine.export.export import export_adapter, export_checkpoint
from app.engine.files.checkpoints import read_manifest
from app.engine.step.engine import Engine
from app.errors import ConfigError
from app.model.layers.held import KINDS
from app.plan.model.held import held_bytes, is_held
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.parity import OneProcess, Trained, alone, few_steps, results
from tests.processes.test_frozen import resumed, saved
from tests.rounding import FP32
from tests.runs import STEADY, engine_of, make_run

STEPS = 3
MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=256, first_k_dense=1)
DENSE = ModelConfig(
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=64,
)
MODELS = {
    "dense": DENSE,
    "moe": dataclasses.replace(DENSE, moe=MOE),
    "narrow": dataclasses.replace(DENSE, ffn_hidden_size=128),
}


def run_with(base: BaseKind | None, model: str = "dense", **sections: object) -> Run:
    """A run whose adapters are on some linear layers only."""
    lora = LoraConfig(rank=4, targets=("q_proj", "mlp"), base=base)
    train = TrainConfig(steps=20, seq_len=16, micro_batch=1, global_batch=2)
    kept = CheckpointConfig(frozen=False)
    given = {"lora": lora, "train": train, "optim": STEADY, "checkpoint": kept}
    return make_run(MODELS[model], **given | sections)


@pytest.mark.parametrize("kind", BaseKind)
def test_values_come_back_within_half_a_step(kind: BaseKind):
    torch.manual_seed(0)
    values = torch.randn(3, 8, 256)
    values[0, 0] = 0
    held = KINDS[kind](values)
    found = held.restored(held.codes)
    assert held.codes.nbytes + 4 * held.scales_N.numel() == held_bytes(kind, (3, 8, 256))
    assert not found[0, 0].any()
    largest = values.abs().amax().item()
    step = {BaseKind.fp8: 1 / 16, BaseKind.nf4: 0.152}[kind]  # of the largest of a block
    assert (found - values).abs().max().item() < step * largest
    again = KINDS[kind](found)
    torch.testing.assert_close(again.restored(again.codes), found, rtol=1e-6, atol=0)


# of bitsandbytes 0.50: quantize_4bit(values, blocksize=64, quant_type="nf4"), then dequantize_4bit
NF4_CODES = (
    "03ae27d04ae27d14bf28d15bf28e15cf39e16cf39e16c04ae27d04ae27d14bf2"
    "8d15bf38e15cf39e16cf39e16c04ae27d14ae27d15bf28d15bf38e16cf39e16c"
)
NF4_VALUES = (-0.721875011920929, -0.28508105874061584, 0.17766232788562775, 0.5218845009803772)


def test_nf4_is_that_of_bitsandbytes():
    sizes = torch.tensor([0.7, 1.3])[:, None]
    values = sizes * ((torch.arange(128) * 37 % 128 - 60) / 64).view(2, 64)
    held = KINDS[BaseKind.nf4](values)
    assert held.codes.numpy().tobytes().hex() == NF4_CODES
    assert held.restored(held.codes)[0, :4].tolist() == list(NF4_VALUES)


ORDER = ScheduleConfig(ScheduleName("1f1b"))
LAYOUTS: dict[str, tuple[BaseKind, str, ParallelConfig, dict[str, object]]] = {
    "alone": (BaseKind.nf4, "dense", ParallelConfig(), {}),
    "moe alone": (BaseKind.fp8, "moe", ParallelConfig(), {}),
    "tp2": (BaseKind.nf4, "dense", ParallelConfig(tp=2), {}),
    "pp2": (BaseKind.fp8, "dense", ParallelConfig(pp=2), {"schedule": ORDER}),
    "moe ep2 dp2": (BaseKind.nf4, "moe", ParallelConfig(ep=2, dp=2), {}),
    "moe tp2 etp2": (BaseKind.fp8, "moe", ParallelConfig(tp=2, etp=2), {}),
}  # fmt: skip


def beside_restored(engine: Engine, kind: BaseKind) -> Trained:
    """Train with the dequantised weights in the place of those held in fewer bits."""
    for chunk in engine.chunks:
        for named, param in chunk.weights():
            if is_held(named.weight):
                held = KINDS[kind](param.data.to(FP32))
                param.data.copy_(held.restored(held.codes))
    return results(engine, STEPS)


@pytest.fixture(scope="module")
def one_process() -> Callable[[BaseKind, str], OneProcess]:
    """Without `lora.base`, beside the same values."""

    @cache
    def of(kind: BaseKind, model: str) -> OneProcess:
        return OneProcess(*alone(run_with(None, model), partial(beside_restored, kind=kind)))

    return of


def steps_and_memory(rank: int, run: Run) -> Trained | None:
    """Train, and see that parameters take what is planned."""
    engine = engine_of(run, rank)
    expect_planned_parameters(engine)
    found = results(engine, STEPS)
    return None if rank else found


def expect_planned_parameters(engine: Engine) -> None:
    plan, rank = engine.plan, engine.groups.pp_rank
    buffers = [each.buffer for chunk in engine.optimizer.grad_buckets for each in chunk]
    held = sum(each.spec.param.nbytes for each in engine.frozen)
    modules = (module for chunk in engine.chunks for module in chunk.modules())
    backends = [getattr(module, "backend", None) for module in modules]
    bases = [getattr(each, "base", each) for each in backends]
    scales = sum(each.held.scales_N.nbytes for each in bases if hasattr(each, "held"))
    planned = {part.name: part.bytes for part in plan.memory[rank].parts}
    assert planned["parameters"] == 4 * sum(each.params.numel() for each in buffers) + held + scales


@pytest.mark.parametrize("name", chosen(LAYOUTS, ["moe tp2 etp2"]))
def test_every_layout_trains_beside_the_same_values(
    one_process: Callable[[BaseKind, str], OneProcess], name: str
):
    kind, model, parallel, sections = LAYOUTS[name]
    run = run_with(kind, model, parallel=parallel, **sections)
    found = run_distributed(steps_and_memory, run.world_size, run)[0]
    assert found is not None
    one_process(kind, model).expect(found)


@pytest.mark.full
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_graphs_and_recomputation_keep_a_held_base(model: str):
    plain = run_distributed(few_steps, 1, run_with(BaseKind.nf4, model), STEPS)[0]
    graph = CudaGraphConfig(GraphImpl.full_iteration)
    for sections in ({"cuda_graph": graph}, {"recompute": RecomputeConfig(full=True)}):
        run = run_with(BaseKind.nf4, model, **sections)
        other = run_distributed(few_steps, 1, run, STEPS)[0]
        for what, values in plain.items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(other[what][key]), torch.as_tensor(value)), key


def test_a_held_base_resumes_without_being_saved(tmp_path: Path):
    run = run_with(BaseKind.nf4)
    ((path, wanted),) = run_distributed(saved, 1, run, tmp_path)
    assert read_manifest(path)["parts"].keys() == wanted.keys()
    ((found, _),) = run_distributed(resumed, 1, run, path)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    export_adapter(path, tmp_path / "adapter", "to-peft")
    with pytest.raises(ConfigError, match=r"lacks .* frozen weights"):
        export_checkpoint(path, tmp_path / "model", "to-hf")


def test_a_base_that_cannot_be_held_is_refused():
    with pytest.raises(ConfigError, match=r"saves whole weights.*checkpoint\.frozen=false"):
        run_with(BaseKind.fp8, checkpoint=CheckpointConfig())
    with pytest.raises(ConfigError, match="scale per 128 values, and a rank has rows of 64 of"):
        run_with(BaseKind.fp8, "narrow", parallel=ParallelConfig(tp=2))
    with pytest.raises(ConfigError, match=r"has no effect without lora\.rank"):
        run_with(None, lora=LoraConfig(base=BaseKind.nf4), checkpoint=CheckpointConfig())
