"""What train.attention_backend=auto stands for: in plans, and on a host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.advice.trials import Trials
from app.choices import AttentionBackendKind, Dtype
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_overrides
from app.cli.options.continued import words_for_plain
from app.cli.plan import main as plan_program
from app.config import HardwareConfig, PrecisionConfig, Run, TrainConfig
from app.engine.files.run_folder import CONFIG, describe_run
from app.engine.ranks.groups import create_groups
from app.engine.start import attention
from app.engine.start.attention import choose_attention
from app.engine.start.start import Start
from app.errors import ConfigError
from app.planner.attention import MOST, planned_attention, with_attention
from app.planner.plan import Plan
from app.rules.attention import KEY
from app.version import Version
from tests.distributed import run_distributed
from tests.plan.test_step_time import PROFILE
from tests.runs import TINY, make_run

AUTO, BY_TORCH, BY_LIBRARY = AttentionBackendKind
GPU = torch.device("cuda")
VERSION = Version("1", None, None)
BF16 = PrecisionConfig(Dtype.bfloat16)


def run_on(gpu: str = "H100", gpu_memory_gib: float = 80.0, **changes: Any) -> Run:
    """A deterministic run in bf16 that is planned for GPUs of this name."""
    profile = replace(PROFILE, gpu=gpu)
    hardware = HardwareConfig(gpu_memory_gib=gpu_memory_gib, profile=profile)
    return make_run(TINY, **{"hardware": hardware, "precision": BF16, **changes})


def long_run(**changes: Any) -> Run:
    """One whose scores are most of its memory."""
    return run_on(train=replace(make_run(TINY).train, seq_len=8192), **changes)


def test_default_is_auto():
    assert TrainConfig().attention_backend is AUTO


@pytest.mark.parametrize(
    ("run", "planned"),
    [
        (run_on(), BY_LIBRARY),
        (run_on("H200"), BY_LIBRARY),
        (run_on("GB200"), BY_LIBRARY),
        (run_on("A100"), BY_TORCH),
        (run_on("RTX 4090"), BY_TORCH),
        (run_on(precision=PrecisionConfig()), BY_TORCH),
        (run_on(train=replace(make_run(TINY).train, deterministic=False)), BY_TORCH),
        (replace(run_on(), hardware=HardwareConfig()), BY_TORCH),
    ],
    ids=["H100", "H200", "GB200", "A100", "RTX 4090", "fp32", "any order", "unknown GPU"],
)
def test_plan_of_auto(run: Run, planned: AttentionBackendKind):
    assert planned_attention(run).train.attention_backend is planned
    typed = replace(run, train=replace(run.train, attention_backend=BY_TORCH))
    assert planned_attention(typed) == typed


def test_plan_takes_the_library_where_all_scores_fit():
    run = long_run()
    needs = [
        Plan(replace(run, train=replace(run.train, attention_backend=each))).busiest.total / 2**30
        for each in (BY_TORCH, BY_LIBRARY)
    ]
    assert needs[0] < needs[1]
    for memory, planned in ((sum(needs) / 2, BY_TORCH), (needs[1] / MOST + 0.001, BY_LIBRARY)):
        tried = long_run(gpu_memory_gib=memory)
        assert planned_attention(tried).train.attention_backend is planned
        # a search plans each run with what fits it, also where it began with another library
        trials = Trials(Plan(tried).gpu_memory)
        for began in (BY_TORCH, BY_LIBRARY):
            candidate = with_attention(tried, began)
            assert trials.plan(candidate).run.train.attention_backend is planned


def there(*_: Any) -> None:
    """A host that has the library."""


def missing(*_: Any) -> None:
    raise ConfigError(KEY, BY_LIBRARY, "is not installed", advice="install it")


def unknown(*_: Any) -> None:
    raise ImportError("no fused_attn\nand more")


def missing_on_rank_1(*_: Any) -> None:
    if torch.distributed.get_rank() == 1:
        missing()


def chosen(
    rank: int, host: Any, run: Run, recorded: str | None, device: torch.device = GPU
) -> tuple[AttentionBackendKind, str | None, tuple[str, ...]]:
    """What a rank chooses on a host, after a checkpoint that recorded a library."""
    saved = {} if recorded == OLD else {"attention_backend": recorded}
    manifest = {"config": {"train": saved}} if recorded else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "library_attention", host)
        plan = Plan(run)
        start = Start(None, manifest=manifest)
        plan, start = choose_attention(plan, create_groups(plan.layout, rank), device, start)
    return plan.run.train.attention_backend, start.by_torch, start.changes


OLD = "of a program without the key"
CHANGED = (f"{KEY}: transformer_engine -> torch",)
CASES = {
    "installed": (there, None, BY_LIBRARY, None, ()),
    "recorded": (there, "transformer_engine", BY_LIBRARY, None, ()),
    "recorded torch": (there, "torch", BY_TORCH, "the checkpoint was trained so", ()),
    "recorded before": (there, OLD, BY_TORCH, "the checkpoint was trained so", ()),
    "unknown release": (
        unknown,
        None,
        BY_TORCH,
        "Transformer Engine cannot be used: ImportError",
        (),
    ),
    "missing": (missing, None, BY_TORCH, "is not installed; install it", ()),
    "missing now": (missing, "transformer_engine", BY_TORCH, "is not installed", CHANGED),
}


@pytest.mark.parametrize("case", CASES)
def test_a_host_chooses(case: str):
    host, recorded, kind, why, changes = CASES[case]
    ((found, reason, told),) = run_distributed(chosen, 1, host, run_on(), recorded)
    assert (found, told) == (kind, changes)
    assert reason is None if why is None else (reason or "").startswith(why)


def test_all_ranks_choose_what_every_host_has():
    run = run_on(parallel=replace(make_run(TINY).parallel, dp=2, world_size=2))
    found = run_distributed(chosen, 2, missing_on_rank_1, run, None)
    assert found == [(BY_TORCH, "is not installed; install it", ())] * 2


@pytest.mark.parametrize("recorded", [None, "transformer_engine"])
def test_a_cpu_computes_by_torch(recorded: str | None):
    cpu = torch.device("cpu")
    ((found, reason, told),) = run_distributed(chosen, 1, there, run_on(), recorded, cpu)
    assert (found, reason) == (BY_TORCH, None)
    assert told == (CHANGED if recorded else ())


def test_a_host_without_the_memory_chooses_torch():
    small = long_run(gpu_memory_gib=Plan(long_run()).busiest.total / 2**30)
    ((found, reason, _),) = run_distributed(chosen, 1, there, small, None)
    assert found is BY_TORCH and "lacks memory" in (reason or "")


def test_a_resumed_run_keeps_the_library_without_asking_the_plan():
    small = long_run(gpu_memory_gib=Plan(long_run()).busiest.total / 2**30)
    kept = run_distributed(chosen, 1, there, small, "transformer_engine")
    assert kept == [(BY_LIBRARY, None, ())]


def test_settings_of_a_run_ask_again(tmp_path: Path):
    """What a run with `auto` saves leaves the choice to the host that resumes it."""
    run = with_attention(load_overrides([]), BY_LIBRARY)
    describe_run(Plan(run), tmp_path, VERSION)
    assert "attention_backend: transformer_engine" in (tmp_path / CONFIG).read_text()
    again = load_overrides([f"resume={tmp_path}"])
    assert again.train.attention_backend is AUTO and not again.parallel.replaced
    typed = replace(run, parallel=replace(run.parallel, replaced=()))
    describe_run(Plan(typed), tmp_path, VERSION)
    with pytest.raises(ConfigError, match=KEY):  # which was typed, and takes no float32
        load_overrides([f"resume={tmp_path}"])


def test_a_whole_configuration_asks_again(tmp_path: Path):
    run = with_attention(load_overrides([]), BY_LIBRARY)
    describe_run(Plan(run), tmp_path, VERSION)
    typed = Typed.parse(["--config-dir", str(tmp_path), "--config-name", "config"])
    assert "train.attention_backend=auto" in words_for_plain(typed, sweeps=False)


def test_a_rehearsal_on_a_cpu_computes_by_torch(capsys: pytest.CaptureFixture[str]):
    words = ["what=rehearse", "model=dense_tiny", "precision=bf16", "hardware=h100", "steps=1"]
    assert plan_program([*words, "train.seq_len=64", "out=null"]) == 0
    assert "rank 0" in capsys.readouterr().out.lower()


def test_typed_library_stays():
    run = run_on()
    run = replace(run, train=replace(run.train, attention_backend=BY_TORCH))
    assert run_distributed(chosen, 1, there, run, "transformer_engine") == [(BY_TORCH, None, ())]
