"""Planned seconds of steps that nobody has measured yet, committed before they are.

    python bench/foretold.py plan                    writes bench/results/foretold.json
    python bench/foretold.py measure GPUS OUT.jsonl  runs bench/step_profile.py on this host's GPUs
    python bench/foretold.py measure GPUS OUT.jsonl FIRST/STEP
                                                     the same for each STEP-th row, from FIRST on
    python bench/foretold.py compare OUT.jsonl …     measured steps beside what was written

No constant of a profile is fitted to these rows, and `plan` refuses to write over its file. Rows
with experts are planned at the load that random weights are taken to have. Errors are planned over
measured, less 1; pairs whose measured steps differ by 5 % or less have no order.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from app.cli.options.compose import load_overrides
from app.planner.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "bench" / "results" / "foretold.json"
GPUS = ("h100", "h200")
DIFFERS = 1.05  # times as long: pairs of steps whose order counts
WHOLE = "train.micro_batch=1 train.global_batch=8 cuda_graph=full_iteration"
DENSE, MOE = f"+experiment=small {WHOLE}", f"+experiment=smallmoe {WHOLE}"
STATIC = "model.moe.dispatcher=static"
ONE = {
    "windows": f"{DENSE} model=mistral_7b model.num_layers=6 train.seq_len=8192"
    " train.global_batch=4",
    "windows, gemma3": f"{DENSE} model=gemma3_12b model.num_layers=6",
    "windows, odd vocabulary": f"{DENSE} model=olmo3_7b model.num_layers=6 train.seq_len=8192"
    " train.global_batch=4",
    "windows and documents": f"{DENSE} model=mistral_7b model.num_layers=6 train.seq_len=8192"
    " train.global_batch=4 data.document_mask=true",
    "adapters, qwen3": f"{DENSE} model=qwen3_8b model.num_layers=12 lora.rank=32"
    " checkpoint.frozen=false",
    "adapters, mistral": f"{DENSE} model=mistral_7b model.num_layers=12 lora.rank=8"
    " train.micro_batch=2 checkpoint.frozen=false",
    "adapters, granite": f"{DENSE} model=granite3_8b model.num_layers=12 lora.rank=16"
    " lora.targets=[mlp] checkpoint.frozen=false",
    "Muon, dense": f"{DENSE} model=qwen3_8b model.num_layers=4 optim=muon",
    "Muon, smollm3": f"{DENSE} model=smollm3_3b model.num_layers=10 optim=muon",
    "documents": f"{DENSE} model=llama3_8b model.num_layers=6 train.seq_len=8192"
    " train.global_batch=4 data.document_mask=true",
    "documents, experts": f"{MOE} data.document_mask=true {STATIC}",
    "odd vocabulary, multipliers": f"{DENSE} model=granite3_8b model.num_layers=10",
    "two norms behind": f"{DENSE} model=olmo2_7b model.num_layers=6",
    "partial rotary": f"{DENSE} model=phi4_mini model.num_layers=12",
    "no gate": f"{DENSE} model=minitron_4b model.num_layers=10",
    "experts, ernie": f"{MOE} model=ernie4_5_21b_a3b model.num_layers=4 {STATIC}",
    "experts, small": f"{MOE} model=granite3_1b_a400m {STATIC}",
    "latent attention": f"{MOE} model=glm4_7_flash model.num_layers=4 {STATIC}",
    "biases of queries": f"{DENSE} model=seed_oss_36b model.num_layers=3",
    "recomputed": f"{DENSE} model=mistral_7b model.num_layers=8 recompute=selective"
    " train.micro_batch=2",
}  # name -> overrides, one GPU
TWO = {
    "windows, dp": f"{DENSE} model=mistral_7b model.num_layers=8 parallel.dp=2",
    "adapters, dp": f"{DENSE} model=qwen3_8b model.num_layers=16 lora.rank=32"
    " checkpoint.frozen=false parallel.dp=2",
    "Muon, dp": f"{DENSE} model=qwen3_8b model.num_layers=6 optim=muon parallel.dp=2",
    "Muon, experts, ep": f"{MOE} optim=muon {STATIC} parallel.dp=2 parallel.ep=2",
    "documents, cp": f"{DENSE} model=llama3_8b model.num_layers=6 train.seq_len=16384"
    " train.global_batch=4 data.document_mask=true parallel.cp=2"
    " parallel.cp_comm_type=all_to_all",
    "odd vocabulary, pp": f"{DENSE} model=olmo3_7b model.num_layers=12 parallel.pp=2",
    "partial rotary, tp": f"{DENSE} model=phi4_mini model.num_layers=16 parallel.tp=2",
    "experts, ernie, ep": f"{MOE} model=ernie4_5_21b_a3b model.num_layers=6 {STATIC}"
    " parallel.dp=2 parallel.ep=2",
    "latent attention, ep": f"{MOE} model=glm4_7_flash model.num_layers=6 {STATIC}"
    " parallel.dp=2 parallel.ep=2",
}  # name -> overrides, two GPUs of one host


def main(words: list[str]) -> None:
    """Carry out one of the commands above."""
    match words:
        case ["plan"]:
            _write()
        case ["measure", gpus, out]:
            _measure(int(gpus), Path(out))
        case ["measure", gpus, out, share]:
            first, step = map(int, share.split("/"))
            _measure(int(gpus), Path(out), slice(first, None, step))
        case ["compare", *files] if files:
            _compare([Path(each) for each in files])
        case _:
            sys.exit(__doc__)


def _rows() -> dict[str, tuple[int, list[str]]]:
    """Name -> GPUs and overrides."""
    return {
        name: (gpus, text.split())
        for gpus, listed in ((1, ONE), (2, TWO))
        for name, text in listed.items()
    }


def _write() -> None:
    if FILE.exists():
        sys.exit(f"{FILE} is there, and what it foretells does not change")
    found = []
    for name, (gpus, overrides) in _rows().items():
        plans = {gpu: Plan(load_overrides([*overrides, f"hardware={gpu}"], gpus)) for gpu in GPUS}
        assert all(plan.fits for plan in plans.values()), name
        row = {"name": name, "gpus": gpus, "overrides": overrides}
        for gpu, plan in plans.items():
            row[f"{gpu}_ms"] = round(plan.step_seconds * 1e3, 2)
        row["gib"] = round(plans["h100"].busiest.total / 2**30, 2)
        found.append(row)
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")


def _measure(gpus: int, out: Path, share: slice = slice(None)) -> None:
    """Run the rows of this number of GPUs that OUT lacks, as many in one program as end well; a row
    that fails is said and left out.
    """
    lines = out.read_text().splitlines() if out.exists() else []
    done = {tuple(json.loads(line)["overrides"]) for line in lines}
    own = [each for count, each in _rows().values() if count == gpus][share]
    left = [each for each in own if tuple(each) not in done]
    start = [sys.executable]
    if gpus > 1:
        start += [*["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"], str(gpus)]
    script = str(ROOT / "bench" / "step_profile.py")
    while left:
        before = len(out.read_text().splitlines()) if out.exists() else 0
        words = [word for each in left for word in ("/", *each)][1:]
        command = [*start, script, "--json", str(out), "--steps", "8", *words]
        ended = subprocess.run(command, check=False)
        measured = len(out.read_text().splitlines()) - before if out.exists() else 0
        if ended.returncode:
            print("failed:", *left[measured])
        left = left[measured + 1 :] if ended.returncode else []


def _compare(files: list[Path]) -> None:
    gpu = torch.cuda.get_device_name().split()[1].lower() if torch.cuda.is_available() else "h100"
    foretold = {tuple(row["overrides"]): row for row in json.loads(FILE.read_text())}
    rows: list[tuple[dict[str, Any], float, float]] = []
    for file in files:
        for line in file.read_text().splitlines():
            found = json.loads(line)
            row = foretold.get(tuple(found.get("overrides", ())))
            if row is not None and "step_ms" in found:
                kind = found.get("gpu", gpu).split()[-1].lower()
                rows.append((row, row[f"{kind}_ms"], found["step_ms"]))
    for row, planned, measured in rows:
        print(f"{planned:9.1f} {measured:9.1f} {planned / measured - 1:+7.1%}  {row['name']}")
    errors = sorted(abs(planned / measured - 1) for _, planned, measured in rows)
    right = count = 0
    for (_, planned, measured), (_, other, others) in combinations(rows, 2):
        if max(measured / others, others / measured) > DIFFERS:
            count += 1
            right += (planned > other) == (measured > others)
    most = errors[min(len(errors) - 1, round(0.9 * (len(errors) - 1)))]
    print(json.dumps({"rows": len(rows), "median_error": round(statistics.median(errors), 4),
                      "p90_error": round(most, 4), "pairs": count,
                      "pairs_in_order": round(right / max(count, 1), 4)}))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
