"""Adapters beside models of `transformers` with the same ones, in the files of `peft`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

from app.choices import DispatcherKind
from app.config import LoraConfig, OptimConfig, ParallelConfig, Run, TrainConfig
from app.engine.build import build_engine
from app.engine.checkpoint.load import Progress
from app.engine.export.export import export_adapter, export_checkpoint
from app.engine.files.checkpoints import checkpoint_name
from app.engine.ranks.groups import create_groups
from app.engine.step.engine import Engine
from app.errors import ConfigError
from app.hf.adapter import CONFIG, WEIGHTS, SavedAdapter
from app.hf.pretrained import Pretrained
from app.planner.plan import Plan
from app.rules import check
from tests.checkpoints import save_checkpoint
from tests.distributed import run_distributed
from tests.hf_folders import save_random
from tests.runs import batches_of, train_steps, whole_parameters

transformers = pytest.importorskip("transformers")

STEPS = 20
LORA = LoraConfig(rank=4, alpha=6.0, rslora=True)
OPTIM = OptimConfig(lr=2e-3, eps=1e-5)
Adapters = dict[str, Tensor]  # by their names in the files of `peft`


def run_from(folder: Path, parallel: ParallelConfig, lora: LoraConfig = LORA) -> Run:
    """Fine-tuning of a folder's model, without losses of routers."""
    model = dataclasses.replace(Pretrained(folder, "model.init_from").model, init_from=str(folder))
    if model.moe is not None:
        moe = dataclasses.replace(
            model.moe, aux_loss_coeff=0.0, dispatcher=DispatcherKind.auto, z_loss_coeff=0.0
        )
        model = dataclasses.replace(model, moe=moe)
    train = TrainConfig(steps=STEPS, seq_len=16, micro_batch=1, global_batch=4)
    return check(Run(model, parallel=parallel, train=train, optim=OPTIM, lora=lora))


def engine_from(run: Run, rank: int, adapter: SavedAdapter | None = None) -> Engine:
    """The engine of a fine-tuning."""
    plan = Plan(run)
    pretrained = Pretrained(Path(str(run.model.init_from)), "model.init_from")
    groups, device = create_groups(plan.layout, rank), torch.device("cpu")
    return build_engine(plan, groups, device, pretrained=pretrained, adapter=adapter)


def tuned(rank: int, run: Run, folder: Path) -> list[float]:
    """Checkpoints before and after training, and the losses."""
    engine = engine_from(run, rank)
    cursor = {"sequences": 0, "stream": {"rank": rank}}
    save_checkpoint(folder / "checkpoints", engine, run, Progress(0, 0), cursor=cursor)
    losses = [loss for loss, _ in train_steps(run, engine, STEPS)]
    save_checkpoint(folder / "checkpoints", engine, run, Progress(STEPS, STEPS), cursor=cursor)
    return losses


def merged(model: nn.Module, adapters: Adapters) -> dict[str, Tensor]:
    """The model's parameters with scale · b · a added."""
    params = dict(model.named_parameters())
    scale = LORA.alpha / 2  # √rank
    for name in [name for name in adapters if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        added = scale * adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
        if f"{module}.weight" in params:
            params[f"{module}.weight"] = params[f"{module}.weight"] + added
            continue
        experts, expert, last = module.rsplit(".", 2)  # stacked: gate rows, then up rows
        stacked = f"{experts}.{'down_proj' if last == 'down_proj' else 'gate_up_proj'}"
        whole = torch.zeros_like(params[stacked])
        first = len(added) if last == "up_proj" else 0
        whole[int(expert), first : first + len(added)] = 1
        spread = F.pad(added, (0, 0, first, whole.shape[1] - first - len(added)))
        params[stacked] = params[stacked] + whole * spread
    return params


def logits_of(model: nn.Module, params: dict[str, Tensor], tokens_BS: Tensor) -> Tensor:
    found: Tensor = functional_call(
        model, params, kwargs={"input_ids": tokens_BS, "use_cache": False}
    ).logits
    return found


def by_torch(model: nn.Module, run: Run, adapters: Adapters) -> list[float]:
    """Train adapters in place with torch.optim.AdamW; returns the losses."""
    model.requires_grad_(False)
    for each in adapters.values():
        each.requires_grad_()
    params = list(adapters.values())
    optimizer = torch.optim.AdamW(
        params,
        lr=OPTIM.lr,
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
        weight_decay=OPTIM.weight_decay,
    )
    losses = []
    for step in range(STEPS):
        batches = batches_of(run, step, 0)
        total = sum(int((batch.labels_BS >= 0).sum()) for batch in batches)
        optimizer.zero_grad()
        whole = merged(model, adapters)
        loss = torch.zeros(())
        for batch in batches:
            logits = logits_of(model, whole, batch.tokens_BS).flatten(0, 1)
            loss = loss + F.cross_entropy(logits, batch.labels_BS.flatten(), reduction="sum")
        loss = loss / total
        loss.backward()
        nn.utils.clip_grad_norm_(params, OPTIM.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_steps_and_files_are_those_of_transformers(tmp_path: Path, family: str):
    """The same adapters after 20 steps, alone and merged; those in the files begin at b = 0."""
    base = tmp_path / "base"
    model, _ = save_random(family, base)
    run = run_from(base, ParallelConfig())
    found = run_distributed(tuned, 1, run, tmp_path)[0]
    folders = [tmp_path / f"adapter-{step}" for step in (0, STEPS)]
    for step, folder in zip((0, STEPS), folders, strict=True):
        export_adapter(tmp_path / "checkpoints" / checkpoint_name(step), folder, "to-peft")
    adapters, ours = (load_file(folder / WEIGHTS) for folder in folders)
    assert not any(value.any() for name, value in adapters.items() if "lora_B" in name)
    bound = max(
        (value.abs().max() * value.shape[1] ** 0.5).item()
        for name, value in adapters.items()
        if "lora_A" in name
    )
    assert 0.9 < bound <= 1.0
    wanted = by_torch(model, run, adapters)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert ours.keys() == adapters.keys()
    for name, value in adapters.items():
        torch.testing.assert_close(ours[name], value.detach(), rtol=2e-3, atol=2e-5, msg=name)
    _expect_merged(tmp_path, model, run, ours)


def _expect_merged(tmp_path: Path, model: nn.Module, run: Run, ours: Adapters) -> None:
    out = tmp_path / "merged"
    export_checkpoint(tmp_path / "checkpoints" / checkpoint_name(STEPS), out, "to-hf")
    exported = type(model).from_pretrained(out, attn_implementation="eager").eval()
    tokens_BS = batches_of(run, 0, 0)[0].tokens_BS
    with torch.no_grad():
        wanted = logits_of(model, merged(model, ours), tokens_BS)
        torch.testing.assert_close(exported(tokens_BS).logits, wanted, rtol=1e-4, atol=1e-4)


def read(rank: int, run: Run) -> dict[str, Tensor]:
    """The adapters of a run that begins with those of a folder."""
    return whole_parameters(engine_from(run, rank, SavedAdapter(run.model, run.lora)))


def trained_whole(rank: int, run: Run, folder: Path) -> dict[str, Tensor]:
    """Checkpoint a few steps of training; returns the adapters."""
    engine = engine_from(run, rank)
    train_steps(run, engine, 2)
    cursor = {"sequences": 0, "stream": {"rank": rank}}
    save_checkpoint(folder / "checkpoints", engine, run, Progress(2, 2), cursor=cursor)
    return whole_parameters(engine)


def test_adapter_is_read_at_any_layout(tmp_path: Path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_random("qwen3_moe", base)
    run = run_from(base, ParallelConfig(tp=2, ep=2, etp=1))
    wanted = run_distributed(trained_whole, 2, run, tmp_path)[0]
    export_adapter(tmp_path / "checkpoints" / checkpoint_name(2), adapter, "to-peft")
    config = json.loads((adapter / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    assert "gate_proj" in config["target_modules"] and config["use_rslora"]
    begun = dataclasses.replace(LORA, init_from=str(adapter))
    for parallel in (ParallelConfig(pp=2), ParallelConfig(tp=2, ep=1, etp=2)):
        other = run_from(base, parallel, begun)
        found = run_distributed(read, other.world_size, other)[0]
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_model_name_or_path": "hub/other"}, "was trained beside hub/other"),
        ({"r": 8}, "has r=8, and lora.rank=4"),
        ({"use_dora": True}, "use_dora=True, which is not built here"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which is not built here"),
        (None, "is of another base: .* has shape"),
    ],
)
def test_adapter_of_another_base_is_refused(
    tmp_path: Path, change: dict[str, Any] | None, said: str
):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_random("llama", base)
    run = run_from(base, ParallelConfig())
    run_distributed(trained_whole, 1, run, tmp_path)
    export_adapter(tmp_path / "checkpoints" / checkpoint_name(2), adapter, "to-peft")
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.05}))
    told = SavedAdapter(run.model, dataclasses.replace(LORA, init_from=str(adapter))).left_out()
    assert told == "lora_dropout=0.05 is left out: adapters have no dropout here"
    path.write_text(json.dumps(json.loads(path.read_text()) | (change or {})))
    model = run.model if change else dataclasses.replace(run.model, ffn_hidden_size=8)
    with pytest.raises(ConfigError, match=said):
        SavedAdapter(model, dataclasses.replace(LORA, init_from=str(adapter)))
