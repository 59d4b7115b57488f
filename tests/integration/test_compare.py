"""bench/compare.py: FLOPs counted by both sides, its worker on a tiny model, failing baselines."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from app.cli.options.compose import load_overrides
from app.plan.cost.flops import flops_per_token

ROOT = Path(__file__).parent.parent.parent
TINY = [
    *(
        "train.device=cpu",
        "model.num_layers=1",
        "model.hidden_size=64",
        "model.num_heads=2",
        "model.num_kv_heads=1",
    ),
    *("model.head_dim=32", "model.vocab_size=264", "model.moe.num_experts=8", "model.moe.top_k=2"),
    *("model.moe.ffn_hidden_size=32", "model.moe.shared_ffn_hidden_size=32"),
]
BASELINE = """
import json, sys
chosen = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if chosen["--graph"] == "full":
    raise RuntimeError("no such graph")
said = {"step_ms": 50.0 if chosen["--graph"] == "none" else 40.0,
        "tok_s_gpu": 10**6, "tflops_gpu": FLOPS / 10**6,
        "alloc_gib": 1.5, "reserved_gib": 2.0, "loss": [5.0, 4.0]}
print("started\\n" + json.dumps(said) + "\\n\\nended")
"""


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "bench/compare.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module  # where dataclasses look up their annotations
    sys.path.append(str(ROOT / "bench"))  # of what it imports
    spec.loader.exec_module(module)
    return module


# As in the baseline's script: hidden, layers, queries, keys or values, feed-forward of a token,
# experts, vocabulary.
BASELINE_SIZES = {
    "small": (1024, 24, 16 * 64, 16 * 64, 2816, 0, 50304),
    "smallmoe": (1024, 16, 16 * 64, 4 * 64, 6 * 512 + 1024, 64, 50304),
    "dense": (4096, 32, 32 * 128, 8 * 128, 14336, 0, 128256),
    "moe": (2048, 48, 32 * 128, 4 * 128, 8 * 768, 128, 151936),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", BASELINE_SIZES)
def test_both_sides_count_the_same_operations(compare: ModuleType, name: str):
    hidden, layers, queries, keys, width, experts, vocab = BASELINE_SIZES[name]
    per_layer = (
        2 * (2 * hidden * queries + 2 * hidden * keys)
        + 2 * 4096 * queries
        + 6 * hidden * width
        + 2 * hidden * experts
    )
    run = load_overrides(compare.MODELS[name])
    assert flops_per_token(run.model, run.train.seq_len) == 3 * (
        layers * per_layer + 2 * hidden * vocab
    )
    assert (run.train.seq_len, run.train.micro_batch, run.train.global_batch) == (4096, 2, 8)
    assert (run.optim.lr, run.optim.beta1, run.optim.beta2, run.optim.clip_norm) == (
        3e-4,
        0.9,
        0.95,
        1.0,
    )
    assert run.model.moe is None or run.model.moe.aux_loss_coeff == 1e-3


@pytest.mark.full
def test_a_table_of_ours_and_a_baseline_that_fails_once(
    compare: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    sizes = [
        "--seq",
        "32",
        "--mbs",
        "1",
        "--gbs",
        "2",
        "--steps",
        "4",
        "--skip",
        "2",
        "--rounds",
        "1",
    ]
    run = load_overrides([*compare.MODELS["smallmoe"], *TINY, "train.seq_len=32"])
    flops = flops_per_token(run.model, 32)
    (tmp_path / "baseline.py").write_text(BASELINE.replace("FLOPS", str(flops)))
    monkeypatch.setattr(compare, "launcher", lambda gpus: (sys.executable,))
    call = [
        "--baseline",
        str(tmp_path / "baseline.py"),
        "--graphs",
        "none",
        "--baseline-graphs",
        "none,partial,full",
        *sizes,
    ]
    assert compare.main([*call, "--json", str(tmp_path / "out.json"), *TINY]) == 1
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
    ]
    head, _, ours, plain, partial, full = lines
    assert tuple(head) == compare.COLUMNS
    assert full == ["baseline", "smallmoe", "full", "1 of 1 failed: RuntimeError: no such graph"]
    assert plain[3:7] == ["50.0", "50.0-50.0", "1280", f"{1280 * flops / 1e12:.1f}"]
    assert (plain[7:9], partial[7], partial[11]) == (["0.80", "1.5"], "1.00", "4.0000")
    said = json.loads((tmp_path / "out.json").read_text())
    (own,) = said["settings"][0]["rounds"]
    assert (
        ours[:4] == ["ours", "smallmoe", "none", f"{own['step_ms']:.1f}"] and own["error"] is None
    )
    assert (
        float(ours[7]) == pytest.approx(own["tokens_per_s"] / 1600, abs=0.006)
        and 1 <= float(ours[10]) <= 4
    )
    assert 5.0 < own["loss"] < 6.5 and len(said["settings"]) == 4  # random tokens: about log 264
    assert said["versions"]["torch"] and "cuda_graph=none" in said["settings"][0]["command"]


def test_settings_take_turns_and_balanced_ones_follow(compare: ModuleType):
    call = [
        "--baseline",
        "p.py",
        "--graphs",
        "none,full_iteration",
        "--force-balance",
        "--gpus",
        "2",
        "--parallel",
        "tp=2,etp=1",
    ]
    settings = list(compare.all_settings(*compare.read_arguments([*call, "optim.lr=1e-4"])))
    order = [(s.who, s.graph, s.balanced) for s in settings]
    turns = [
        ("ours", "none"),
        ("baseline", "none"),
        ("ours", "full_iteration"),
        ("baseline", "full"),
    ]
    assert order == [(*turn, balanced) for balanced in (False, True) for turn in turns]
    for setting in settings:
        assert "--nproc-per-node=2" in setting.command
        if setting.who == "ours":
            assert {"parallel.tp=2", "optim.lr=1e-4", f"cuda_graph={setting.graph}"} < set(
                setting.command
            )
            assert ("model.moe.force_balance=true" in setting.command) == setting.balanced
        else:
            assert dict(setting.env) == {
                "NVTE_USE_CUTLASS_GROUPED_GEMM": "1",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            }
            assert "--tp 2 --etp 1" in " ".join(setting.command)
            assert ("--balance" in setting.command) == setting.balanced


def test_overrides_may_be_of_a_graph_mode(compare: ModuleType):
    call = ["--baseline", "p.py", "--graphs", "full_iteration", "cuda_graph.optimizer=true"]
    run = compare.composed(*compare.read_arguments(call))
    assert run.cuda_graph.optimizer


def test_both_sides_in_fp8_are_compared_with_their_like(compare: ModuleType):
    call = ["--baseline", "p.py", "--fp8", "current,block"]
    settings = list(compare.all_settings(*compare.read_arguments(call)))
    recipes = ["", "", "current", "current", "block", "block"]
    assert [setting.recipe for setting in settings] == recipes
    names = {"current": "tensorwise", "block": "blockwise"}
    for speed, setting in enumerate(settings, start=1):
        given = " ".join(setting.command)
        wanted = f"precision.fp8.recipe={setting.recipe}"
        if setting.who == "baseline":
            wanted = f"--fp8 {names.get(setting.recipe)}"
        assert not setting.recipe or wanted in given
        assert setting.recipe or ("fp8.recipe" not in given and "--fp8" not in given)
        setting.rounds.append(compare.Round(step_ms=1.0, tokens_per_s=1000.0 * speed))
    found = [(row[2], row[7]) for row in compare.rows(settings, 1e-3) if row[0] == "ours"]
    assert found == [("none", "0.50"), ("none, current", "0.50"), ("none, block", "0.83")]


def test_rounds_make_a_median_and_a_spread(compare: ModuleType):
    setting = next(compare.all_settings(*compare.read_arguments(["--baseline", "p.py"])))
    setting.rounds.extend(
        compare.Round(step_ms=ms, tokens_per_s=1e3 * ms, graphs=4) for ms in (30.0, 10.0, 20.0)
    )
    (row,) = compare.rows([setting], 1e-3)
    assert row[3:8] == ["20.0", "10.0-30.0", "20000", "20.0", "-"] and row[12] == "4"


def test_other_operations_and_no_answer_are_refused(compare: ModuleType):
    run = load_overrides(compare.MODELS["small"])
    said = {"step_ms": 80.0, "tok_s_gpu": 400_000, "alloc_gib": 1, "reserved_gib": 1, "loss": [1.0]}
    right = flops_per_token(run.model, 4096) * 0.4e6 / 1e12
    assert (
        compare.baseline_round(
            json.dumps(said | {"tflops_gpu": round(right, 1)}) + "\n", run
        ).tokens_per_s
        == 8 * 4096 / 0.08
    )
    with pytest.raises(ValueError, match="the baseline counts"):
        compare.baseline_round(json.dumps(said | {"tflops_gpu": right * 1.003}) + "\n", run)
    with pytest.raises(ValueError, match="no line of JSON"):
        compare.baseline_round("nothing\n", run)
