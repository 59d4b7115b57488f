"""First lines of a run: calm by default, everything with log.verbose, the folder with log=none."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from app.config import Run
from app.engine.report.opening import print_opening
from app.engine.start.start import Data, Start
from app.engine.step.engine import Engine
from app.plan.formatting import GIB
from app.planner.plan import Plan
from app.version import Version
from tests.distributed import run_distributed
from tests.training import composed, corpus_in, train_rank

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
H100 = ("hardware=h100", "precision=bf16", "model=small", "train.attention_backend=torch")
MODEL = "moe_tiny: 2.59 M parameters, 825.47 k used per token, 4 layers, float32"


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    size = SimpleNamespace(total_memory=79 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: size)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))


def opening(
    capsys: pytest.CaptureFixture[str], *overrides: str, device: torch.device = CPU,
    padding: float = 0.0, ranks: int = 1, settings: str | None = None, by_torch: str | None = None,
) -> list[tuple[str, str]]:  # fmt: skip
    """Return the rows that a run prints, as (heading, text)."""
    sequences = SimpleNamespace(padding=padding, documents=10**9)
    train: Any = SimpleNamespace(sequences=sequences, cut=None, max_documents=16)
    plan = Plan(composed(overrides, ranks))
    engine = cast(Engine, SimpleNamespace(plan=plan, device=device, recorder=None, static=None))
    data = cast(Data, SimpleNamespace(train=train, validation=[]))
    start = Start(None, by_torch=by_torch)
    version = Version("1.2", None, None)
    print_opening(engine, "runs/x", start, data=data, version=version, settings=settings)
    said = capsys.readouterr().out
    assert said.endswith("\n\n")
    return [(line[:12].strip(), line[14:]) for line in said.splitlines()[:-1]]


def test_a_run_on_a_cpu_opens_with_four_rows(capsys: pytest.CaptureFixture[str]):
    assert opening(capsys, "train.steps=700") == [
        ("model", MODEL),
        ("run", "700 steps, 1.43 M tokens of stdlib"),
        ("device", "CPU, 2 threads"),
        ("folder", "runs/x"),
    ]


def test_several_ranks_open_with_their_layout(capsys: pytest.CaptureFixture[str]):
    rows = dict(opening(capsys, "parallel=ep2", "data=text", "data.path='a/*.md'", ranks=2))
    assert rows["device"] == "CPU, 2 processes of 2 threads: dp 2, ep 2"
    assert rows["run"].endswith(" tokens of a/*.md")


def test_a_gpu_opens_with_memory_and_pace(capsys: pytest.CaptureFixture[str]):
    rows = opening(capsys, *H100, "parallel=dp2", device=GPU, ranks=2)
    assert [name for name, _ in rows] == ["model", "run", "device", "folder", "planned", "slower"]
    told = dict(rows)
    assert told["device"] == "2 × NVIDIA H100 80GB HBM3: dp 2"
    memory, pace = told["planned"].split(", ")
    assert memory.endswith(" GiB of 79.0") and 0 < float(memory.split()[0]) < 79
    assert pace.endswith(" ms per step") and float(pace.split()[0]) > 0
    assert "attention" in told["slower"] and told["slower"].endswith(": log.verbose=true says why")


def test_warnings_are_told_without_log_verbose(capsys: pytest.CaptureFixture[str]):
    overrides = ("model.moe.force_balance=true", "train.micro_batch=16", "train.global_batch=16")
    assert opening(capsys, *overrides, padding=0.3)[-2:] == [
        ("data", "30.0% of positions are padding: a sequence ends after data.max_documents=16 "
                 "documents, also where more would fit"),
        ("WARNING", "model.moe.force_balance sends tokens to experts in turn: for timing only"),
    ]  # fmt: skip
    rows = opening(capsys, padding=0.02, settings="of runs/a")
    assert "data" not in dict(rows) and rows[-1] == ("settings", "of runs/a")
    large = ("model=llama3_8b", "hardware=h100", "precision=bf16")
    planned = dict(opening(capsys, *large, device=GPU))["planned"]
    assert "; it will not fit: python -m app.cli.plan" in planned


def test_log_verbose_tells_everything(capsys: pytest.CaptureFixture[str]):
    rows = dict(
        opening(capsys, *H100, "log.verbose=true", device=GPU, padding=0.02, settings="of a")
    )
    assert {"model", "layout", "step", "run", "device", "folder", "memory", "attention", "planned",
            "data", "version", "settings"} <= set(rows)  # fmt: skip
    assert rows["version"] == "1.2, commit not known" and rows["settings"] == "of a"
    assert rows["memory"].count(",") > 2 and "by speeds" in rows["planned"]
    told = opening(capsys, *H100, "log.verbose=true", device=GPU, by_torch="the GPU lacks memory")
    assert ("attention", "by torch, as the GPU lacks memory") in told


def printed(rank: int, run: Run) -> str:
    with redirect_stdout(io.StringIO()) as said:
        train_rank(rank, run, {})
    return said.getvalue()


def test_log_none_prints_the_run_folder_alone(tmp_path: Path):
    settings = (*corpus_in(tmp_path / "corpus"), f"run_dir={tmp_path}/run", "train.steps=1")
    run = composed((*settings, "log=none", "checkpoint=none"), 1)
    assert run_distributed(printed, 1, run) == [f"{tmp_path}/run\n"]
