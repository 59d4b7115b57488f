"""Attention to documents and windows: kernels beside plain causal attention, and whole steps.

    python bench/documents.py [--json OUT.json] [--parts kernels steps]

`kernels` prints for every shape, kernel and choice the times of forward and backward in µs, their
sum over that of torch's fastest causal kernel on whole sequences, memory that backward has besides
its results, how far output and gradients are from fp64 with a mask, and whether four backwards give
the same bits. `steps` runs bench/throughput.py with `+experiment=small`, and prints the time of a
step over that without documents. What fails says why, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from throughput import web_lengths
from timing import gpu_time
from torch import Tensor

from app.model.layers.attend import Attend, DocumentOffsets, TorchAttention, visible

# sequences, queries, keys, query heads, key/value heads, head width
SHAPES = ("2x4096x4096x16x16x64", "1x8192x8192x32x4x128", "1x4096x8192x32x4x128")
CHECKED = "2x1000x1536x8x2x64"  # beside fp64 with a mask
WINDOW = 1024
MIB, REPEATS = 2**20, 4
ROOT = Path(__file__).parent.parent
Choices = dict[str, Any]
STEPS = {
    "whole sequences": (),
    "documents by torch": ("data.document_mask=true",),
    "documents by Transformer Engine": (
        "data.document_mask=true",
        "train.attention_backend=transformer_engine",
    ),
    "whole sequences, full iteration": ("cuda_graph=full_iteration",),
    "documents by torch, full iteration": ("data.document_mask=true", "cuda_graph=full_iteration"),
    "documents by Transformer Engine, full iteration": (
        "data.document_mask=true",
        "train.attention_backend=transformer_engine",
        "cuda_graph=full_iteration",
    ),
}


def kernels() -> Iterator[tuple[str, Callable[[], Attend]]]:
    """Name and kernel."""
    for deterministic in (False, True):
        order = "ordered" if deterministic else "any order"
        yield f"torch, {order}", lambda ordered=deterministic: TorchAttention(ordered)
        yield f"Transformer Engine, {order}", lambda ordered=deterministic: by_library(ordered)


def by_library(deterministic: bool) -> Attend:
    """Transformer Engine's, of which not every host has the library."""
    from app.model.attention.transformer_engine import TransformerEngineAttention

    return TransformerEngineAttention(deterministic)


def choices_of(sequences: int, queries: int, keys: int) -> dict[str, Choices]:
    """What is asked of a kernel, by name."""
    generator = np.random.default_rng(1)
    most = max(16, keys // 64)
    ends_BD = np.full((sequences, most), keys)
    for ends_D in ends_BD:
        found = np.cumsum(web_lengths(generator, 100 * keys))
        found = found[found < keys][: most - 1]
        ends_D[: len(found)] = found
    ends = torch.from_numpy(ends_BD).int().cuda()
    one = torch.full_like(ends, keys)
    web, whole = (DocumentOffsets.of(each, queries, keys) for each in (ends, one))
    few = int((ends < keys).sum()) / sequences + 1
    return {
        "causal": {"window": None, "documents": None},
        "one document": {"window": None, "documents": whole},
        f"{few:g} documents": {"window": None, "documents": web},
        f"window {WINDOW}": {"window": WINDOW, "documents": None},
        f"{few:g} documents, window {WINDOW}": {"window": WINDOW, "documents": web},
    }


def heads_of(shape: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    batch, queries, keys, heads, kv_heads, width = map(int, shape.split("x"))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, length, count, width, device="cuda", generator=generator).bfloat16()
        for length, count in (
            (queries, heads),
            (keys, kv_heads),
            (keys, kv_heads),
            (queries, heads),
        )
    )
    return q, k, v, grad


def measured(attend: Attend, heads: tuple[Tensor, ...], choices: Choices) -> dict[str, Any]:
    """Times, memory and whether gradients repeat."""
    *given, grad = heads
    leaves = [each.detach().requires_grad_() for each in given]

    def forward() -> Tensor:
        return attend(*leaves, scale=None, **choices)

    out = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    first = backward()
    repeats = all(
        torch.equal(one, other)
        for _ in range(REPEATS)
        for one, other in zip(first, backward(), strict=True)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = backward()
    torch.cuda.synchronize()
    scratch = torch.cuda.max_memory_allocated() - before - sum(each.nbytes for each in made)
    times = [1e3 * gpu_time(each)[0] for each in (forward, backward)]
    return {
        "repeats": repeats,
        "forward_us": round(times[0], 1),
        "backward_us": round(times[1], 1),
        "backward_mib": round(scratch / MIB),
    }


def off(attend: Attend, heads: tuple[Tensor, ...], choices: Choices) -> list[float]:
    """Norm of the difference from fp64 over the norm: output, gradients."""
    *given, grad = heads

    def found(leaves: list[Tensor], by_mask: bool) -> list[Tensor]:
        if not by_mask:
            out = attend(*leaves, scale=None, **choices)
        else:
            q, k, v = (each.transpose(1, 2) for each in leaves)
            mask = visible(len(q), q.shape[2], k.shape[2], q.device, **choices)
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True
            ).transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    wanted = found([each.double().requires_grad_() for each in given], by_mask=True)
    ours = found([each.detach().requires_grad_() for each in given], by_mask=False)
    return [
        float(f"{(one - other).norm() / other.norm():.2g}")
        for one, other in zip(ours, wanted, strict=True)
    ]


def tried(row: dict[str, Any], fill: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row with what was found, or with why nothing was."""
    try:
        row |= fill()
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        torch.cuda.empty_cache()
    print(*(f"{key}={value}" for key, value in row.items()), sep="  ", flush=True)
    return row


def kernel_rows() -> Iterator[dict[str, Any]]:
    """A row per shape, choice and kernel."""
    for shape in (CHECKED, *SHAPES):
        batch, queries, keys, *_ = map(int, shape.split("x"))
        heads, baseline = heads_of(shape), None
        for asked, choices in choices_of(batch, queries, keys).items():
            for name, kernel in kernels():
                row: dict[str, Any] = {"shape": shape, "asked": asked, "kernel": name}
                if shape == CHECKED:
                    yield tried(row, partial(checked, kernel, heads, choices))
                    continue
                found = tried(row, partial(timed, kernel, heads, choices, baseline=baseline))
                if baseline is None and "forward_us" in found:
                    baseline = found["forward_us"] + found["backward_us"]
                yield found


def checked(
    kernel: Callable[[], Attend], heads: tuple[Tensor, ...], choices: Choices
) -> dict[str, Any]:
    """Errors of a kernel."""
    return {"off": off(kernel(), heads, choices)}


def timed(
    kernel: Callable[[], Attend],
    heads: tuple[Tensor, ...],
    choices: Choices,
    *,
    baseline: float | None,
) -> dict[str, Any]:
    """What is measured of a kernel, and its time over the baseline's, µs."""
    found = measured(kernel(), heads, choices)
    spent = found["forward_us"] + found["backward_us"]
    return found | {"over_causal": round(spent / (baseline or spent), 3)}


def step_rows(steps: int) -> Iterator[dict[str, Any]]:
    """A row per run."""
    baselines: dict[bool, float] = {}
    for name, overrides in STEPS.items():
        yield tried({"step": name}, partial(step, overrides, steps, baselines))


def step(overrides: tuple[str, ...], steps: int, baselines: dict[bool, float]) -> dict[str, Any]:
    """What bench/throughput.py found; `baselines` are ms of steps without documents, eager and
    captured.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "bench/throughput.py"), "step", "--out", folder]
        command += [f"--steps={steps}", f"--skip={steps // 2}", "+experiment=small", *overrides]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if ran.returncode:
            raise RuntimeError((ran.stdout + ran.stderr)[-300:])
        result = json.loads((Path(folder) / "step.json").read_text())
    captured = "cuda_graph=full_iteration" in overrides
    baseline = baselines.setdefault(captured, result["step_ms"])
    about = [line for line in ran.stdout.splitlines() if line.startswith("documents of")]
    return {
        **{key: result[key] for key in ("step_ms", "memory_reserved_peak_gib", "last_loss")},
        "over_whole": round(result["step_ms"] / baseline, 3),
        "about": "; ".join(about),
    }


def main() -> None:
    """Print the rows of the parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--parts", nargs="+", default=("steps", "kernels"))
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    rows = []
    for part in given.parts:
        for row in step_rows(given.steps) if part == "steps" else kernel_rows():
            rows.append(row)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
