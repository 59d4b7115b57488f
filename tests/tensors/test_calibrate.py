"""`app.cli.calibrate` on a CPU with small sizes: what it measures and writes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from app.choices import Dtype, Fp8Recipe, LinearBackendKind
from app.cli.calibrate import main, option_path
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.config import HardwareProfile
from app.engine.calibration import fp8, solve
from app.engine.calibration.clock import Clock
from app.engine.calibration.fp8 import experts_speeds, fp8_speeds
from app.engine.calibration.kernels import kernel_speeds
from app.engine.calibration.links import link_speeds
from app.engine.calibration.profile_file import gpu_words, measured_profile, write_profile
from app.engine.fp8 import Maker, arithmetic_maker
from app.errors import ConfigError
from app.fp8.row_scaled import RowScaled
from app.planner.plan import Plan
from tests.distributed import run_distributed
from tests.tensors.calibrate import CPU, TINY, Counting

GIVEN = {"ring_gb_s": 300.0, "all_to_all_gb_s": 200.0, "send_gb_s": 100.0}


def test_gemms_are_taken_apart():
    """Seconds made by the plan's formula give its numbers back."""
    memory, tflops, share = 4000.0, 700.0, 0.4
    found = []
    for flops, moved in ((1e12, 4e8), (5e10, 1.5e8), (2e11, 2e8)):
        found.append((flops, moved, flops / (tflops * 1e12) + share * moved / (memory * 1e9)))
    assert solve.gemms(found, memory) == pytest.approx((tflops, share))
    # nothing hides more than all of its bytes, or less than none
    hidden = [(flops, moved, flops / 7e14 - 1e-6) for flops, moved, _ in found[:2]]
    assert solve.gemms(hidden, memory)[1] == 0.0
    slow = [(flops, moved, flops / 7e14 + 2 * moved / 4e12) for flops, moved, _ in found[:2]]
    assert solve.gemms(slow, memory)[1] == 1.0


def test_experts_gemms_are_taken_apart():
    tflops, tile, weights = 600.0, 96.0, 1e8
    found = []
    for rows in (1024, 256):
        flops = 2 * rows * weights
        found.append((flops, weights, (flops + 2 * tile * weights) / (tflops * 1e12)))
    assert solve.grouped(found[0], found[1], most=900.0) == pytest.approx((tflops, tile))
    rate, more = solve.grouped(found[0], found[1], most=500.0)
    assert rate <= 500.0 and more < tile


def test_lines_have_a_start_and_a_slope():
    points = [(size, 2e-5 + size / 3e11) for size in (2**18, 2**22, 2**26)]
    assert solve.line(points) == pytest.approx((2e-5, 3e11))
    before, _ = solve.line([(size, size / 3e11) for size in (1e6, 2e6)])
    assert before == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ConfigError, match="larger messages took no longer"):
        solve.line([(1e6, 2e-3), (2e6, 1e-3)])


def test_every_recipe_in_fp8_is_measured():
    """By the reference on a CPU: three GEMMs of 2·64³ operations per recipe, and quantisation of
    64² elements: `current` moves 6 bytes for each.
    """
    given = {"other_gb_s": [1.0, 1.0], "gemm_memory": 0.5, "kernel_us": 1.0}
    reference = LinearBackendKind.torch
    found, missing = fp8_speeds(Counting(), 64, given, reference)
    assert missing == []
    moved = 0.5 * 3 * 2 * 64**2 / 1e9
    for first, name in ((1, "current"), (5, "delayed"), (8, "block")):
        took = sum(range(first, first + 3)) / 1e4 - 3 * (1e-6 + moved)
        assert found.pop(f"fp8_{name}_tflops") == pytest.approx(6 * 64**3 / took / 1e12)
    took = 4 / 1e4 - 4 * 1e-6
    assert found == {"fp8_quantise_gb_s": pytest.approx(6 * 64**2 / took / 1e9)}


def test_experts_in_fp8_are_measured():
    """4 experts with 64 rows each, and 2 that are computed for nobody; or why they are not."""
    given = {"other_gb_s": [1.0], "gemm_memory": 0.5, "kernel_us": 1.0, "grouped_tile": 2.0}
    found, missing = experts_speeds(Counting(), TINY, given, LinearBackendKind.torch)
    moved = 0.5 * 2 * (4 * 64 * 32 + 4 * 32 * 16 + 4 * 64 * 16) / 1e9
    took = 1e-4 - 1e-6 - moved
    flops = 2 * 4 * 66 * 32 * 16
    assert missing == []
    assert found == {"fp8_grouped_tflops": pytest.approx(flops / took / 1e12)}


def test_experts_that_are_not_to_be_had_in_fp8_are_said(monkeypatch):
    def refused(asked: LinearBackendKind, dtype: Dtype, device: torch.device) -> RowScaled:
        raise ConfigError("precision.fp8.include", "experts", "not on this GPU")

    monkeypatch.setattr(fp8, "experts_arithmetic", refused)
    assert experts_speeds(Counting(), TINY, {}) == ({}, ["of experts: not on this GPU"])


def test_recipes_that_are_not_to_be_had_are_said(monkeypatch):
    def refused(asked: LinearBackendKind, recipe: Fp8Recipe, device: torch.device) -> Maker:
        if recipe is Fp8Recipe.block:
            raise ConfigError("precision.fp8.recipe", recipe, "this GPU has none")
        return arithmetic_maker(asked, recipe, device)

    monkeypatch.setattr(fp8, "arithmetic_maker", refused)
    given = {"other_gb_s": [1.0, 1.0], "gemm_memory": 0.5, "kernel_us": 1.0}
    found, missing = fp8_speeds(Counting(), 64, given, LinearBackendKind.torch)
    assert missing == ["block: this GPU has none"] and "fp8_block_tflops" not in found
    assert {"fp8_current_tflops", "fp8_quantise_gb_s"} <= set(found)


def test_the_clock_runs_what_it_measures():
    ran = []
    clock = Clock(CPU)
    assert clock.seconds(lambda: ran.append(1)) > 0 and len(ran) > 10
    told: list[str] = []
    clock.seconds(lambda: told.append("run"), before=lambda: told.append("before"))
    assert told == ["before", "run"] * (len(told) // 2)
    ran.clear()
    assert 0.001 < clock.steady(lambda: (ran.append(1), time.sleep(0.001)), 0.1) < 0.1
    assert len(ran) > 10 + 13  # behind those of `seconds`
    x = torch.randn(8, 8)
    forward, backward = clock.passes(lambda x: (x.sin(), x.cos()), [x])
    assert forward > 0 and backward > 0 and x.grad is None
    assert clock.start() > 0 and clock.launch(torch.sin, [x], kernels=2) > 0


@cache
def speeds_of_kernels() -> dict[str, Any]:
    return kernel_speeds(Counting(), TINY)


def measured(links: dict[str, float] | None = None) -> HardwareProfile:
    return measured_profile("NVIDIA H200", "a test", speeds_of_kernels().copy(), links or {})


@pytest.mark.full
def test_what_is_measured_is_a_profile_that_plans(tmp_path: Path):
    """Every key of a profile is measured or stated; what is written is read again, to four digits,
    and planned with.
    """
    profile = measured(GIVEN | {"collective_us": 12.5, "send_us": 7.5})
    assert profile.gpu == "H200" and profile.peer_gb_s == profile.ring_gb_s == 300.0
    write_profile(tmp_path / "hardware/mine.yaml", profile, "NVIDIA H200", 139.8)
    typed = ["--config-dir", str(tmp_path), "+experiment=small", "hardware=mine"]
    run = load_typed(Typed.parse(typed))
    assert run.hardware.peak_tflops == 989.0 and run.hardware.gpu_memory_gib == 139.8
    read = run.hardware.profile
    assert read is not None
    for field in dataclasses.fields(profile):
        was, now = getattr(profile, field.name), getattr(read, field.name)
        if isinstance(was, tuple) and isinstance(was[0], tuple):
            for one, other in zip(was, now, strict=True):
                assert other == pytest.approx(one, rel=1e-3)
        else:
            assert now == (was if isinstance(was, str | None) else pytest.approx(was, rel=1e-3))
    assert Plan(run).profile is read and Plan(run).step_seconds > 0


def test_attention_has_a_row_per_width_and_length():
    rows = measured().attention
    assert [row[:2] for row in rows] == [(16.0, 16.0), (16.0, 32.0), (32.0, 16.0), (32.0, 32.0)]


def test_one_gpu_says_that_its_links_are_stated():
    alone = measured()
    assert "one GPU measured none" in alone.source and alone.ring_gb_s == 280.0
    assert "one GPU" not in measured(GIVEN).source
    assert alone.sustained_tflops <= alone.gemm_tflops


def test_impossible_speeds_are_refused():
    speeds = speeds_of_kernels() | {"router_tflops": 1e9}
    with pytest.raises(ConfigError, match=r"hardware\.profile\.router_tflops"):
        measured_profile("NVIDIA H200", "a test", speeds, {})
    speeds |= {"router_tflops": 1000.0}  # more than the data sheet of an H200 says
    with pytest.raises(ConfigError, match=r"router_tflops=1000\.0: is more .* at most 989"):
        measured_profile("NVIDIA H200", "a test", speeds, {})


def _links(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    found = link_speeds(Counting(), group, sizes=(2**12, 2**13))
    assert set(found) == {*GIVEN, "collective_us", "send_us"}
    # a line through (4096 B, 1e-4 s) and (8192 B, 2e-4 s), of the first two of six
    assert found["ring_gb_s"] == pytest.approx(2**12 / 1e-4 / 1e9)
    assert found["collective_us"] == pytest.approx(0, abs=1e-6)
    assert found["send_us"] == pytest.approx(400)
    everybody: list[object] = [None, None]
    dist.all_gather_object(everybody, found)
    assert everybody[0] == everybody[1]


def test_links_are_measured_and_all_ranks_agree():
    run_distributed(_links, 2)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ([], "device=cpu: this host has no usable GPU to measure"),
        (["nmae=mine"], "; --help explains them; did you mean name=mine?"),
        (["mine"], "the options are"),
    ],
)
def test_mistakes_cost_a_line(typed: list[str], said: str, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(typed, os.getppid())
    told = capsys.readouterr().err
    assert ended.value.code == 2 and said in told and told.count("\n") == 1


def test_names_of_options(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gpu_words("NVIDIA H100 PCIe") == "H100 PCIe"
    found = option_path({}, "NVIDIA H100 PCIe")
    assert found == tmp_path / ".config/graphfold/hardware/h100_pcie_here.yaml"
    assert option_path({"name": "a", "out": "b"}, "X") == Path("b/hardware/a.yaml")
    for name in ("h200", "a b", "../up"):
        with pytest.raises(ConfigError, match="name="):
            option_path({"name": name}, "NVIDIA H200")


@pytest.mark.full
def test_a_mistake_is_told_before_torch_is_loaded():
    code = (
        "import os, sys; from app.cli.calibrate import main\n"
        "code = 0\n"
        "try: main(sys.argv[1:], os.getppid())\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(100 * ('torch' in sys.modules) + code)"
    )
    root = Path(__file__).resolve().parents[2]
    for word, ended in (("nmae=mine", 2), ("--help", 0)):
        line = [sys.executable, "-c", code, word]
        done = subprocess.run(line, cwd=root, capture_output=True, check=False)
        assert done.returncode == ended, done.stderr


def test_options_of_the_users_own_are_found(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".config/graphfold/hardware"
    folder.mkdir(parents=True)
    (folder / "at_home.yaml").write_text("gpu_memory_gib: 12.5\n")
    assert load_typed(Typed(("hardware=at_home",))).hardware.gpu_memory_gib == 12.5


@pytest.mark.full
def test_two_processes_measure_and_one_writes(tmp_path: Path):
    """Environment as set by torchrun; only the GPUs are stand-ins."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line += ["-m", "tests.tensors.calibrated", "name=mine", f"out={tmp_path}"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written in") == 1 and "plan with hardware=mine" in done.stdout
    typed = ["--config-dir", str(tmp_path), "+experiment=small", "hardware=mine"]
    profile = load_typed(Typed.parse(typed)).hardware.profile
    assert profile is not None and profile.gpu == "H200" and "one GPU" not in profile.source
    assert profile.ring_gb_s != 280.0 and profile.fp8_block_tflops is not None
