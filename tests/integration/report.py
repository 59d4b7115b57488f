"""Shared by test_report.py and other tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = """\
model: {{name: moe_tiny, num_layers: {layers}}}
optim: {{lr: 0.003}}
train: {{steps: {steps}}}
data: {{path: [a, b]}}
checkpoint: {{interval: {saves}}}
parallel: {{world_size: {layers}}}
log: {{group: g{layers}}}
run_dir: /x/{layers}
resume: null
"""


def write_run(
    folder: Path, loss: float, layers: int = 2, steps: int = 6, taken: int = 6, saves: int = 0
) -> Path:
    """A run of `steps` steps of which it has `taken`; the slow first ones must not count."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(layers=layers, steps=steps, saves=saves))
    rows: list[dict[str, Any]] = [{"step": 0, "val_loss": 9.5, "val_tokens": 8}]
    for n in range(1, taken + 1):
        rate = 10.0 if n <= taken / 2 else 1000.0 * layers + n
        rows.append(
            {
                "step": n,
                "loss": loss + 6 - n,
                "tokens": 64 * n,
                "tokens_per_s": rate,
                "tflops_per_gpu": rate / 1e4,
            }
        )
    if taken:
        rows[1]["memory_peak_gib"], rows[-1]["memory_peak_gib"] = 1.5, 1.25
    if taken == steps:
        rows.append({"step": steps, "val_loss": loss, "val_tokens": 8})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
