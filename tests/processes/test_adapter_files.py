"""Adapters beside models of `transformers` with the same ones, in the files of `peft`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.choices import DispatcherKind
from app.config import LoraConfig, OptimConfig, ParallelConfig, Run, TrainConfig
from app.engine.build import build_engine
from app.engine.checkpoint.load import Progress
from app.engine.export.export import export_adapter, export_checkpoint
from app.engine.files.checkpoints import checkpoint_name
from app.engine.ranks.groups import create_groups
from app.engine.step.engine import Engine
from app.errors import ConfigError
from app.hf.adapter import CONFIG, WEIGHTS, SavedAdapter, adapter_files
from app.hf.adapter_names import AdapterNames
from app.hf.pretrained import Pretrained
from app.plan.sharding.reshard import Block
from app.planner.plan import Plan
from app.rules import check
from tests.cases import chosen
from tests.checkpoints import cursor_of, save_checkpoint
from tests.distributed import run_distributed
from tests.hf_folders import save_random, their_logits
from tests.runs import batches_of, train_steps, whole_gradients, whole_parameters
from tests.tensors.hf_parity import CASES

transformers = pytest.importorskip("transformers")

STEPS = 20
LORA = LoraConfig(rank=4, alpha=6.0, rslora=True)
OPTIM = OptimConfig(lr=2e-3, eps=1e-5)


def run_from(folder: Path, parallel: ParallelConfig, lora: LoraConfig = LORA) -> Run:
    """Fine-tuning of a folder's model, without losses of routers."""
    model = replace(Pretrained(folder, "model.init_from").model, init_from=str(folder))
    if model.moe is not None:
        moe = replace(
            model.moe, aux_loss_coeff=0.0, dispatcher=DispatcherKind.auto, z_loss_coeff=0.0
        )
        model = replace(model, moe=moe)
    train = TrainConfig(steps=STEPS, seq_len=16, micro_batch=2, global_batch=2)
    return check(Run(model, parallel=parallel, train=train, optim=OPTIM, lora=lora))


def engine_from(run: Run, rank: int, adapter: SavedAdapter | None = None) -> Engine:
    """The engine of a fine-tuning."""
    plan = Plan(run)
    pretrained = Pretrained(Path(str(run.model.init_from)), "model.init_from")
    groups, device = create_groups(plan.layout, rank), torch.device("cpu")
    return build_engine(plan, groups, device, pretrained=pretrained, adapter=adapter)


def tokens_of(run: Run) -> Tensor:
    return batches_of(run, 0, 0)[0].tokens_BS


@torch.no_grad()
def logits_of(engine: Engine, run: Run) -> Tensor:
    (chunk,), batch = engine.chunks, batches_of(run, 0, 0)[0]
    context = chunk.context(batch.positions_BS, batch.ends_BD)
    return chunk.logits(chunk(batch.tokens_BS, context).x)


class Whole:
    """Reader of whole tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str, box: Block) -> Tensor:
        return self.tensors[name].view(box.shape)[tuple(map(slice, box.start, box.stop))]


def tuned(rank: int, run: Run, folder: Path) -> tuple[list[tuple[float, float]], Tensor]:
    """Checkpoints before and after training, and files with the last gradients or ones in the place
    of adapters; returns losses with norms, and logits.
    """
    engine = engine_from(run, rank)
    cursor = cursor_of(0, rank)
    save_checkpoint(folder / "checkpoints", engine, run, Progress(0, 0), cursor=cursor)
    seen = train_steps(run, engine, STEPS)
    save_checkpoint(folder / "checkpoints", engine, run, Progress(STEPS, STEPS), cursor=cursor)
    names = AdapterNames.of(run.model, run.lora, "lora", run.lora)
    gradients = whole_gradients(engine)
    ones = {name: torch.ones_like(value) for name, value in gradients.items()}
    for place, values in (("gradients", gradients), ("ones", ones)):
        (folder / place).mkdir()
        for name, data in adapter_files(names, Whole(values)).items():
            (folder / place / name).write_bytes(data)
    engine.gather_all_params()
    return seen, logits_of(engine, run)


# `peft` reads a deprecated property of `transformers`, and has patterns that match in a later pass
OF_PEFT = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:The following (rank|alpha)_pattern"
)


def with_adapter(base: Path, folder: Path, **how: Any) -> Any:
    """The model of a folder with an adapter, by `peft`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, attn_implementation="eager", experts_implementation="eager"
    )
    return pytest.importorskip("peft").PeftModel.from_pretrained(model.eval(), folder, **how)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if ".lora_" in name}


def by_peft(
    model: nn.Module, run: Run, ones: Mapping[str, Tensor]
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Train the adapters of a model with torch.optim.AdamW; returns losses with norms, and the last
    gradients. `ones`: 0 where a matrix of several linear layers lies outside their blocks.
    """
    params = parameters_of(model)
    for name, each in params.items():
        each.register_hook(ones[name].detach().mul)
    optimizer = torch.optim.AdamW(
        params.values(),
        lr=OPTIM.lr,
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
        weight_decay=OPTIM.weight_decay,
    )
    seen = []
    for step in range(STEPS):
        batches = batches_of(run, step, 0)
        total = sum(int((batch.labels_BS >= 0).sum()) for batch in batches)
        optimizer.zero_grad()
        loss = torch.zeros(())
        for batch in batches:
            logits = model(input_ids=batch.tokens_BS, use_cache=False).logits.flatten(0, 1)
            loss = loss + F.cross_entropy(logits, batch.labels_BS.flatten(), reduction="sum")
        loss = loss / total
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params.values(), OPTIM.clip_norm)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen, {name: each.grad for name, each in params.items()}


FAMILIES = {
    "llama": (),
    "gemma3_text": (),
    "qwen3_moe": ("self_attn", "mlp", "gate"),
    "deepseek_v3": (),
    "gpt_oss": ("self_attn", "mlp", "router"),
    "granite": (),
    "starcoder2": (),
    "nemotron": (),
    "gpt_neox": (),
    "phi3": (),
    "cohere2": (),
    "granitemoe": ("self_attn", "mlp", "gate"),
    "ernie4_5_moe": (),
    "mixtral": (),
}


@OF_PEFT
@pytest.mark.parametrize("family", chosen({name: name for name in FAMILIES}, ["phi3", "nemotron"]))
def test_steps_and_files_are_those_of_peft(tmp_path: Path, family: str):
    """Losses, norms, gradients, adapters and logits after 20 steps; B begins as zeros."""
    check_steps_and_files(tmp_path, family, FAMILIES[family])


def check_steps_and_files(tmp_path: Path, family: str, targets: tuple[str, ...]) -> None:
    base = tmp_path / "base"
    save_random(family, base)
    run = run_from(base, ParallelConfig(), replace(LORA, targets=targets))
    found, logits = run_distributed(tuned, 1, run, tmp_path)[0]
    folders = [tmp_path / f"adapter-{step}" for step in (0, STEPS)]
    for step, folder in zip((0, STEPS), folders, strict=True):
        export_adapter(tmp_path / "checkpoints" / checkpoint_name(step), folder, "to-peft")
    begun = load_file(folders[0] / WEIGHTS)
    assert not any(value.any() for name, value in begun.items() if "lora_B" in name)
    bound = max(
        (value.abs().max() * value.shape[1] ** 0.5).item()
        for name, value in begun.items()
        if "lora_A" in name
    )
    assert 0.9 < bound <= 1.0
    model = with_adapter(base, folders[0], is_trainable=True)
    wanted, gradients = by_peft(model, run, parameters_of(with_adapter(base, tmp_path / "ones")))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    trained = with_adapter(base, folders[1])
    expect_close(parameters_of(trained), parameters_of(model), rtol=2e-3, atol=2e-5)
    ours = parameters_of(with_adapter(base, tmp_path / "gradients"))
    expect_close(ours, gradients, rtol=2e-3, atol=2e-5)
    with torch.no_grad():
        theirs = trained(tokens_of(run)).logits
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)
    out = tmp_path / "merged"
    export_checkpoint(tmp_path / "checkpoints" / checkpoint_name(STEPS), out, "to-hf")
    merged = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    torch.testing.assert_close(their_logits(merged, tokens_of(run)), theirs, rtol=1e-4, atol=1e-4)


def expect_close(found: dict[str, Tensor], wanted: dict[str, Tensor], **how: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].detach(), value.detach(), **how, msg=name)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYERS = {  # other linear layers that `peft` adapts in a family: those with several of ours share A
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj"],
    "gpt_neox": ["query_key_value"],
}
PARAMETERS = {  # family -> adapted parameters in `peft`, and our targets
    "llama": ([], ("self_attn",)),
    "qwen3_moe": (
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        ("self_attn", "gate_up_proj", "mlp.experts.down_proj", "gate"),
    ),
    "qwen3_moe-down": (["mlp.experts.down_proj"], ("self_attn", "mlp.experts.down_proj")),
    "gpt_oss": (
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"],
        ("self_attn", "mlp", "mlp.router"),
    ),
    "granitemoe": (
        [f"block_sparse_moe.{name}" for name in ("experts.gate_up_proj", "router.weight")],
        ("self_attn", "gate_up_proj", "router"),
    ),
    "granitemoe-shared": (
        ["block_sparse_moe.experts.gate_up_proj"],
        ("self_attn", "gate_proj", "up_proj"),
    ),
    "phi3": ([], ("self_attn", "gate_proj", "up_proj")),
    "gpt_neox": ([], ("q_proj", "k_proj", "v_proj")),
    "cohere2": ([], ("self_attn",)),
}


def logits_with(rank: int, run: Run) -> Tensor:
    return logits_of(engine_from(run, rank, SavedAdapter(run.model, run.lora)), run)


@OF_PEFT
@pytest.mark.parametrize("name", chosen({name: name for name in PARAMETERS}, ["qwen3_moe", "phi3"]))
def test_adapter_that_peft_saved_is_read(tmp_path: Path, name: str):
    peft = pytest.importorskip("peft")  # takes seconds
    base, folder = tmp_path / "base", tmp_path / "adapter"
    family = name.partition("-")[0]
    model, _ = save_random(family, base)
    parameters, targets = PARAMETERS[name]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=LAYERS.get(family, ATTENTION),
        target_parameters=parameters,
        init_lora_weights=False,  # B is not zero
    )
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    run = run_from(base, ParallelConfig(), replace(LORA, targets=targets, init_from=str(folder)))
    found = run_distributed(logits_with, 1, run)[0]
    wanted = their_logits(adapted, tokens_of(run))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def read(rank: int, run: Run) -> dict[str, Tensor]:
    """The adapters of a run that begins with those of a folder."""
    return whole_parameters(engine_from(run, rank, SavedAdapter(run.model, run.lora)))


def trained_whole(rank: int, run: Run, folder: Path) -> dict[str, Tensor]:
    """Checkpoint a few steps of training; returns the adapters."""
    engine = engine_from(run, rank)
    train_steps(run, engine, 2)
    cursor = cursor_of(0, rank)
    save_checkpoint(folder / "checkpoints", engine, run, Progress(2, 2), cursor=cursor)
    return whole_parameters(engine)


EXPERTS = (
    ParallelConfig(tp=2, ep=2, etp=1),
    ParallelConfig(tp=2, ep=1, etp=2),
    ParallelConfig(pp=2),
)
DENSE = (ParallelConfig(tp=2), ParallelConfig(), ParallelConfig(pp=3))
LAYOUTS = {  # of the run that writes an adapter, then of others that read it
    "qwen3_moe": EXPERTS,
    "granitemoe": (*EXPERTS[:2], ParallelConfig(pp=3)),
    "phi3": DENSE,
    "gpt_neox": DENSE,
    "cohere2": DENSE,
}


@pytest.mark.parametrize("family", chosen(LAYOUTS, ["qwen3_moe", "phi3"]))
def test_adapter_is_read_at_any_layout(tmp_path: Path, family: str):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_random(family, base)
    first, *others = LAYOUTS[family]
    run = run_from(base, first)
    wanted = run_distributed(trained_whole, 2, run, tmp_path)[0]
    export_adapter(tmp_path / "checkpoints" / checkpoint_name(2), adapter, "to-peft")
    config = json.loads((adapter / CONFIG).read_text())
    found = (config["r"], config["lora_alpha"], config["use_rslora"])
    if family == "qwen3_moe":
        assert found == (4, 12, False)
        assert "gate_proj" in config["target_modules"]
    if family == "phi3":
        assert found == (12, 36, False)
        ranks = {"mlp.down_proj": 4, "mlp.gate_up_proj": 8, "self_attn.o_proj": 4}
        assert config["rank_pattern"] == ranks
        assert config["alpha_pattern"] == {name: 3 * rank for name, rank in ranks.items()}
    begun = replace(LORA, init_from=str(adapter))
    for parallel in others:
        other = run_from(base, parallel, begun)
        found = run_distributed(read, other.world_size, other)[0]
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"base_model_name_or_path": "hub/other"}, "was trained beside hub/other"),
        ({"r": 8}, "has r=8, and lora.rank=4"),
        ({"use_dora": True}, "use_dora=True, which is not built here"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which is not built here"),
        (None, "is of another base: .* has shape"),
    ],
)
def test_adapter_of_another_base_is_refused(
    tmp_path: Path, other: dict[str, Any] | None, said: str
):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_random("llama", base)
    run = run_from(base, ParallelConfig())
    run_distributed(trained_whole, 1, run, tmp_path)
    export_adapter(tmp_path / "checkpoints" / checkpoint_name(2), adapter, "to-peft")
    change(adapter / CONFIG, lora_dropout=0.05)
    told = SavedAdapter(run.model, replace(LORA, init_from=str(adapter))).left_out()
    assert told == "its lora_dropout=0.05 is left out: lora.dropout=0"
    change(adapter / CONFIG, **(other or {}))
    model = run.model if other else replace(run.model, ffn_hidden_size=8)
    with pytest.raises(ConfigError, match=said):
        SavedAdapter(model, replace(LORA, init_from=str(adapter)))


def test_one_adapter_for_joined_layers_is_told(tmp_path: Path):
    """Its A may be copied, but of three times the rank it is no three adapters."""
    model = CASES["phi3-long"]()[2]
    lora = replace(LORA, targets=("self_attn",), init_from=str(tmp_path))
    shapes = {own.name: own.weight.shape for own, _ in AdapterNames.of(model, lora, "k", 1).parts()}
    values = Whole({name: torch.ones(shape) for name, shape in shapes.items()})
    for name, data in adapter_files(AdapterNames.of(model, lora, "k", 1), values).items():
        (tmp_path / name).write_bytes(data)
    assert SavedAdapter(model, lora).left_out() is None
    tensors = load_file(tmp_path / WEIGHTS)
    name = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"
    tensors[name][0, -1] = 1  # a query's row, of the values' columns
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match=r"layers in model\.layers\.0\.self_attn\.qkv_proj, and"):
        SavedAdapter(model, lora)
    config = {"r": 4, "lora_alpha": 6, "use_rslora": True, "rank_pattern": {}, "alpha_pattern": {}}
    change(tmp_path / CONFIG, **config)
    own = {"qkv_proj.lora_A": slice(4), "qkv_proj.lora_B": (slice(None), slice(4))}
    for name, value in tensors.items():
        place = next((place for end, place in own.items() if end in name), ...)
        tensors[name] = value[place].contiguous()
    save_file(tensors, tmp_path / WEIGHTS)
    assert "A of qkv_proj is copied to each" in str(SavedAdapter(model, lora).left_out())
    change(tmp_path / CONFIG, rank_pattern={"o_proj": 8})
    with pytest.raises(ConfigError, match=r"r=8 for model\.layers\.0\.self_attn\.o_proj, and"):
        SavedAdapter(model, lora)


def change(path: Path, **values: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
