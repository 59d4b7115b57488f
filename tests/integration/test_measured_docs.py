"""Numbers in docs/benchmarks.md, fp8.md and cuda-graphs.md are those of the files they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "bench/results"
BENCHMARKS, FP8, GRAPHS = (
    (ROOT / f"docs/{name}.md").read_text().replace("**", "")
    for name in ("benchmarks", "fp8", "cuda-graphs")
)
FP8_STEPS = ("fp8_steps", "two_gpus_steps", "two_gpus_small", "fp8_own_steps")
Json = dict[str, Any]


def recorded(*names: str) -> list[Json]:
    """Rows of files of lines."""
    lines = [line for n in names for line in (RESULTS / f"{n}.jsonl").read_text().splitlines()]
    return [json.loads(line) for line in lines]


def table(page: str, head: str) -> list[list[str]]:
    """Rows of the table whose first line begins like this."""
    (rows,) = re.findall(rf"^\| {re.escape(head)}.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [[cell.strip() for cell in row[1:-1].split(" |")] for row in rows.splitlines()]


def two(value: float) -> str:
    """Two digits; halves, which floats miss, go up."""
    return f"{value + 1e-9:.2f}"


def short(value: float) -> str:
    """Milliseconds with three digits or one after the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def test_comparison_on_one_gpu_is_as_measured():
    settings: list[Json] = []
    for _, who, graphs, ms, tokens, tflops, reserved, file in table(BENCHMARKS, "model | | graphs"):
        if file:
            content = json.loads((RESULTS / file).read_text())
            settings, per_token = content["settings"], content["flops_per_token"]
        name = {"Graphfold": "ours", "baseline": "peer"}[who]
        graph = {"full iteration": "full"}.get(graphs, graphs.strip("`"))
        (rounds,) = [s["rounds"] for s in settings if (s["who"], s["graph"]) == (name, graph)]
        rate = median(each["tokens_per_s"] for each in rounds)
        assert float(ms) == pytest.approx(median(r["step_ms"] for r in rounds), abs=0.06)
        assert float(tokens.replace(",", "")) == pytest.approx(rate, abs=51)
        assert int(tflops) == round(rate * per_token / 1e12)
        assert float(reserved) == pytest.approx(rounds[0]["reserved_gib"], abs=0.051)


def test_long_runs_are_as_measured():
    rows = [
        [
            f"{r['step_ms']:.1f}",
            f"{r['tflops_per_gpu']:.0f}",
            two(r["planned_gib"]),
            two(r["peak_gib"]),
        ]
        for r in recorded("microbatches", "long_sequences")
    ]
    shown = table(BENCHMARKS, "run | sequences")
    assert len(shown) == 8 and all(row[2:] in rows for row in shown)


def test_ratios_to_the_newest_baseline_are_as_measured():
    """Rows of both programs with the same model, precision and microbatches."""
    ours: dict[tuple[str, int, bool], set[str]] = {}
    for row in recorded("microbatches"):
        words = dict(word.split("=", 1) for word in row["overrides"])
        if words.get("parallel.tp") != "2":
            model = {"llama3_8b": "dense"}.get(words.get("model", ""), words["+experiment"])
            size = int(words.get("train.micro_batch", 2))
            key = model, size, "precision.fp8.recipe" in words
            ours.setdefault(key, set()).add(f"{row['tflops_per_gpu']:.0f}")
    theirs = {
        (args["model"], args["mbs"], "fp8" in args): f"{row['tflops_gpu']:.0f}"
        for row in recorded("peer_0192")
        for args in [row["args"]]
    }
    settings = [("dense", size, fp8) for fp8 in (False, True) for size in (1, 4)]
    shown = table(BENCHMARKS, "model | GPUs")[3:8]
    for setting, row in zip((*settings, ("smallmoe", 8, False)), shown, strict=True):
        _, _, rate, baseline, ratio = row
        assert rate in ours[setting] and baseline == theirs[setting]
        assert ratio == f"{two(int(rate) / int(baseline))} ×"


def test_attention_steps_are_as_measured():
    times = iter(f"{row['step_ms']:.1f}" for row in recorded("attention_steps"))
    for row in table(BENCHMARKS, "model | any order"):
        assert [float(ms) for ms in row[1:]] == pytest.approx(
            [float(next(times)) for _ in range(3)], abs=0.11
        )


def test_fp8_steps_are_as_measured():
    found = {f"{row['step_ms']:.1f}": row for row in recorded(*FP8_STEPS)}
    shown = table(FP8, "model | FP8 layers | recipe")
    assert len(shown) >= 10
    first = 0.0
    for _, layers, recipe, ms, tflops, ratio, *peaks in shown:
        row = found[ms]
        first = float(ms) if layers == "none" else first
        typed = [word for word in row["overrides"] if word.startswith("precision.fp8.recipe=")]
        assert typed == ([f"precision.fp8.recipe={recipe.strip('`')}"] if recipe else [])
        assert float(tflops) == pytest.approx(row["tflops_per_gpu"], abs=0.051)
        assert float(ratio) == pytest.approx(first / float(ms), abs=0.0051)
        assert [float(peak) for peak in peaks] == pytest.approx(
            [row["planned_gib"], row["peak_gib"]], abs=0.0051
        )


def test_fp8_layers_are_as_measured():
    rows = json.loads((RESULTS / "fp8_layers.json").read_text())["rows"]
    found = {(row["shape"], row["way"]): row["both_us"] for row in rows}
    for shape, *cells in table(FP8, "rows × input"):
        ways = ("bf16", "current", "delayed", "block")
        assert cells == [f"{found[shape, way]:.0f}" for way in ways]


def test_fp8_losses_are_as_measured():
    content = json.loads((RESULTS / "fp8_losses_words.json").read_text())
    means = content["small, on an H200"]["means"]
    for way, mean, off, _ in table(FP8, "| mean | off bf16"):
        found = means[way.strip("`")]
        assert mean == f"{found['val_loss']:.4f}"
        if off:
            sign = "−" if found["off_percent"] < 0 else "+"
            percent, error = abs(found["off_percent"]), found["standard_error"]
            assert off == f"{sign}{percent:.2f} % ({two(error)})"


def test_graphs_are_as_measured():
    rows = [
        [f"{r['graphs']['seconds']:.2f}", short(r["eager_ms"]), short(r["step_ms"])]
        for r in recorded("graphs", "graphs_static")
        if "eager_ms" in r
    ]
    shown = table(GRAPHS, "model, ranks | graphs")
    assert len(shown) >= 12 and [row for row in shown if row[3:] not in rows] == []


def test_memory_of_graphs_is_as_measured():
    found = {
        (f"{r['graphs']['static']:,}", f"{r['graphs']['pool'] + r['graphs']['cut']:,}")
        for r in recorded("graphs")
        if "graphs" in r
    }
    assert {tuple(row[1:]) for row in table(GRAPHS, "model | static")} - found == set()


def test_full_size_captures_are_as_measured():
    found = [[f"{r['step_ms']:.1f}", two(r["peak_gib"])] for r in recorded("two_gpus_captured")]
    (said,) = re.findall(r"([\d.]+) against ([\d.]+) ms", GRAPHS)
    assert {*said} <= {ms for ms, _ in found}
