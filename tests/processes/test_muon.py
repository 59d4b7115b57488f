"""Muon: one process against torch's, every layout against one process, checkpoints, capture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from app.choices import Dtype, MuonDtype, MuonTp, OptimizerKind
from app.cli.options.compose import load_overrides
from app.config import ParallelConfig, PrecisionConfig, Run
from app.config.training import MuonConfig
from app.engine.files.run_folder import read_metrics
from app.engine.step.engine import Engine
from app.errors import ConfigError
from app.optim.muon import MuonShard, orthogonalise
from app.planner.plan import Plan
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.parity import OneProcess, Trained, few_steps
from tests.processes.layouts import Case, run_of
from tests.processes.test_layouts import alone
from tests.rounding import error
from tests.runs import STEADY, TINY, engine_of, make_run, train_steps, whole_gradients
from tests.training import composed, corpus_in, train_rank, untimed

FP32 = MuonConfig(dtype=MuonDtype.fp32)
MUON = dataclasses.replace(STEADY, name=OptimizerKind.muon, muon=FP32, bucket_numel=1500)
STEPS = 3
ORDER = ("none", "all_gather", "auto")  # schedule, context parallelism, dispatcher
LAYOUTS: dict[str, Case] = {  # model, tp, cp, ep, etp, pp, vpp, dp
    "dp2": ("dense", 1, 1, 1, 1, 1, 1, 2, *ORDER),
    "tp2": ("dense", 2, 1, 1, 1, 1, 1, 1, *ORDER),
    "tp2 cp2": ("dense", 2, 2, 1, 1, 1, 1, 1, *ORDER),
    "pp2 tp2": ("dense", 2, 1, 1, 1, 2, 1, 1, "1f1b", *ORDER[1:]),
    "dp4": ("moe", 1, 1, 1, 1, 1, 1, 4, *ORDER),
    "dp4 ep2": ("moe", 1, 1, 2, 1, 1, 1, 4, *ORDER),
    "dp2 ep2": ("moe", 1, 1, 2, 1, 1, 1, 2, *ORDER),
    "tp2 dp2 etp2": ("moe", 2, 1, 1, 2, 1, 1, 2, *ORDER),
    "tp2 dp2 ep2 etp2": ("moe", 2, 1, 2, 2, 1, 1, 2, *ORDER),
    "pp2 dp2 ep2": ("moe", 1, 1, 2, 1, 2, 1, 2, "zero_bubble_h1", *ORDER[1:]),
}
QUICK = ["dp4 ep2", "tp2 dp2 etp2"]


def steps_on_rank_zero(rank: int, run: Run) -> Trained | None:
    found = few_steps(rank, run, STEPS)
    return None if rank else found


@pytest.fixture(scope="module")
def one_process() -> dict[str, OneProcess]:
    return {
        model: OneProcess.of(run_of(alone(model), optim=MUON), STEPS) for model in ("dense", "moe")
    }


@pytest.mark.parametrize("name", chosen(LAYOUTS, QUICK))
def test_layouts_train_like_one_process(one_process: dict[str, OneProcess], name: str):
    case = LAYOUTS[name]
    run = run_of(case, optim=MUON)
    found = run_distributed(steps_on_rank_zero, run.world_size, run)[0]
    one_process[case[0]].expect(found, case)


@pytest.mark.full
def test_blocks_are_updated_alone(one_process: dict[str, OneProcess]):
    """Approximate: other parameters than those of whole matrices, and only where tp divides."""
    blocks = dataclasses.replace(MUON, muon=dataclasses.replace(FP32, tp=MuonTp.blocks))
    results = {
        name: run_distributed(steps_on_rank_zero, 2, run_of(LAYOUTS[name], optim=blocks))[0]
        for name in ("tp2", "dp2")
    }
    one_process["dense"].expect(results["dp2"], "dp2")
    found, wanted = results["tp2"]["parameters"], one_process["dense"].plain["parameters"]
    assert max(error(found[key], wanted[key]) for key in wanted) > 1e-4


DENSE = dataclasses.replace(TINY, moe=None)


class Reference:
    """torch's Muon on the matrices of DENSE, and its AdamW on the rest, fed with gradients."""

    def __init__(self, run: Run, first: dict[str, Tensor]) -> None:
        self.values = {name: value.clone() for name, value in first.items()}
        config = run.optim
        self.matrices = {name: self._split(name) for name in first}
        muon, adam = list[nn.Parameter](), dict[bool, list[nn.Parameter]]({True: [], False: []})
        self.params = {}
        for name, parts in self.matrices.items():
            linear = name.startswith("layers.") and len(parts[0].shape) == 2
            self.params[name] = [nn.Parameter(part.clone()) for part in parts]
            target = muon if linear else adam[len(parts[0].shape) == 2]
            target += self.params[name]
        decay = config.weight_decay
        self.muon = torch.optim.Muon(
            muon, config.lr, decay, config.muon.momentum, adjust_lr_fn="match_rms_adamw"
        )
        self.adam = torch.optim.AdamW(
            [
                {"params": params, "weight_decay": decay if decays else 0.0}
                for decays, params in adam.items()
            ],
            config.lr,
            (config.beta1, config.beta2),
            config.eps,
        )

    def _split(self, name: str, values: Tensor | None = None) -> list[Tensor]:
        """The matrices of a parameter, from values of its flat shape."""
        leaf = name.rsplit(".", 1)[-1]
        flat = self.values[name] if values is None else values
        shapes = {
            "wqkv": (2, 4, 8, 32), "wo": (32, 32), "w_up": (2, 48, 32), "w_down": (32, 48),
            "embedding": (64, 32), "head": (64, 32),
        }  # fmt: skip
        value = flat.view(shapes.get(leaf, (-1,)))
        if leaf == "wqkv":  # per key/value head: 2 query heads, key, value, 8 rows each
            parts = value[:, :2], value[:, 2:3], value[:, 3:]
            return [part.reshape(-1, 32) for part in parts]
        return [*value] if leaf == "w_up" else [value]

    def step(self, gradients: dict[str, Tensor]) -> None:
        for name, params in self.params.items():
            for param, grad in zip(params, self._split(name, gradients[name]), strict=True):
                param.grad = grad.clone()
        self.muon.step()
        self.adam.step()


def mains(engine: Engine) -> dict[str, Tensor]:
    """The fp32 parameters of one process."""
    return {owned.spec.name: owned.main.clone() for owned in engine.optimizer.param_shards()}


def beside_torch(rank: int, run: Run, steps: int, wide: bool) -> dict[str, float]:
    """Errors of parameters after some steps, next to torch's with the same gradients."""
    engine = engine_of(run, rank)
    reference = Reference(run, mains(engine))
    for step in range(steps):
        (_, norm), *_ = train_steps(run, engine, 1, first=step)
        factor = min(1.0, run.optim.clip_norm / (norm + 1e-6))
        gradients = {name: grad * factor for name, grad in whole_gradients(engine).items()}
        if wide:  # torch's Muon rounds to bf16 otherwise
            with patch.object(Tensor, "bfloat16", Tensor.clone):
                reference.step(gradients)
        else:
            reference.step(gradients)
    found = mains(engine)
    return {
        f"{name}.{nth}": error(ours, param)
        for name, params in reference.params.items()
        for nth, (ours, param) in enumerate(
            zip(reference._split(name, found[name]), params, strict=True)
        )
    }


@pytest.mark.cover(1)
@pytest.mark.parametrize("params", [Dtype.float32, Dtype.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", MuonDtype, ids=str)
def test_twenty_steps_equal_torchs(params: Dtype, dtype: MuonDtype):
    muon = MuonConfig(dtype=dtype)
    run = make_run(
        DENSE,
        optim=dataclasses.replace(MUON, muon=muon),
        precision=PrecisionConfig(params),
    )
    wide = dtype is MuonDtype.fp32
    (found,) = run_distributed(beside_torch, 1, run, 20, wide)
    assert len(found) > 20
    # in bf16 an update has an error of a part in 2⁸, and is 20 times 1e-3 of a parameter's 0.02
    assert max(found.values()) < (1e-5 if wide else 2e-3), found


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 40)], ids=str)
def test_singular_values_become_about_one(shape: tuple[int, ...]):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices.clone()))
    assert values.min() > 0.3 and values.max() < 1.3


def state_bytes(rank: int, run: Run) -> dict[str, int]:
    """Bytes of the moments and fp32 parameters of this rank, by optimizer."""
    engine = engine_of(run, rank)
    found = {kind.value: 0 for kind in OptimizerKind}
    for chunk in engine.optimizer.shards:
        for shard in chunk:
            own = [*shard.moments.values()]
            own += [] if shard.main is shard.own_params else [shard.main]
            found[shard.kind.value] += sum(each.nbytes for each in own)
            assert (set(shard.moments) == {"momentum"}) == isinstance(shard, MuonShard)
    return found


@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("params", [Dtype.float32, Dtype.bfloat16], ids=str)
def test_state_is_as_planned(dp: int, ep: int, params: Dtype):
    run = make_run(
        optim=MUON, parallel=ParallelConfig(dp=dp, ep=ep), precision=PrecisionConfig(params)
    )
    parts = {part.name: part.bytes for part in Plan(run).memory[0].parts}
    for found in run_distributed(state_bytes, dp, run):
        assert sum(found.values()) == parts["optimizer"]
        assert min(found.values()) > 0


def overrides(folder: Path, name: str, *more: str) -> list[str]:
    """A short run with Muon; checkpoints after steps 3 and 6."""
    return [
        *corpus_in(folder),
        "optim=muon",
        "optim.muon.dtype=fp32",
        "optim.warmup_steps=2",
        "optim.bucket_numel=2000",
        "train.eval_interval=0",
        "checkpoint.interval=3",
        "train.steps=6",
        f"run_dir={folder}/{name}",
        *more,
    ]


def trained(folder: Path, name: str, ranks: int, *more: str) -> dict[int, float]:
    """Loss of every step of a run."""
    run = composed(overrides(folder, name, *more), ranks)
    run_distributed(train_rank, ranks, run, {})
    return {row["step"]: row["loss"] for row in read_metrics(folder / name) if "loss" in row}


@pytest.mark.full
def test_resumes_with_the_same_bits_and_in_other_layouts(tmp_path: Path):
    two = ("parallel.dp=2", "parallel.ep=2")
    whole = trained(tmp_path, "whole", 2, *two)
    first = trained(tmp_path, "parts", 2, *two, "train.steps=3")
    assert first == {step: whole[step] for step in (1, 2, 3)}
    other = ("parallel.tp=2", "parallel.etp=1", f"resume={tmp_path}/parts")
    moved = trained(tmp_path, "moved", 2, *other)
    assert list(moved) == [4, 5, 6]
    assert {step: pytest.approx(whole[step], rel=1e-5) for step in moved} == moved
    assert trained(tmp_path, "parts", 2, *two, "resume=auto") == whole
    with pytest.raises(ConfigError, match=r"optim\.name=adamw: .* trained with muon"):
        folder = f"run_dir={tmp_path}/adam"
        adam = [word for word in overrides(tmp_path, "adam") if not word.startswith("optim.muon")]
        adam += ["optim=adamw", f"resume={tmp_path}/parts", folder]
        check_resume(composed(adam, 1))


def check_resume(run: Run) -> None:
    """Raise what the start of this run would."""
    from app.engine.start.start import find_start

    find_start(run)


@pytest.mark.full
def test_captured_updates_are_eager_ones(tmp_path: Path):
    graphs = ("cuda_graph=full_iteration", "cuda_graph.optimizer=true", "cuda_graph.warmup_steps=2")
    dispatcher = ("model.moe.dispatcher=static", "parallel.dp=2", "parallel.ep=2")
    trained(tmp_path, "eager", 2, *dispatcher)
    trained(tmp_path, "graphs", 2, *dispatcher, *graphs)
    rows = [untimed(tmp_path / name) for name in ("eager", "graphs")]
    eager, captured = (
        [{key: row[key] for key in ("loss", "grad_norm")} for row in of if "loss" in row]
        for of in rows
    )
    assert eager == captured
    assert any(row.get("graph_count") for row in read_metrics(tmp_path / "graphs"))


WRONG = {
    "optim.muon.tp=half": "optim.muon.tp",
    "optim.muon.momentum=1": r"optim\.muon\.momentum=1.*: must be in \[0, 1\)",
    "optim.muon.dtype=fp8": "optim.muon.dtype",
}


@pytest.mark.parametrize(("word", "message"), WRONG.items(), ids=WRONG)
def test_wrong_keys(word: str, message: str):
    with pytest.raises(Exception, match=message):
        load_overrides(["optim=muon", word])


def test_keys_of_muon_need_muon():
    with pytest.raises(ConfigError, match=r"optim\.muon\.momentum=0\.9: is not read by .*adamw"):
        load_overrides(["optim.muon.momentum=0.9"])
    assert load_overrides(["optim.name=muon", "optim.muon.momentum=0.9"])
