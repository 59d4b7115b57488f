"""Attention by torch and by Transformer Engine: time, memory, and whether gradients repeat.

    python bench/attention.py [--json OUT.json] [--shapes 2x4096x4096x16x16x64 …]

A shape is sequences, queries, keys, query heads, key/value heads, head width; fewer queries than
keys are the last of them, as on a rank of context parallelism. Prints for every kernel the times of
forward and backward, medians of cold runs in µs; the memory that backward has meanwhile besides its
results; how far output and gradients are from fp32 with exact products, norms of the difference
over norms; whether eight backwards give the same bits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from timing import gpu_time
from torch import Tensor

from app.model.attention.transformer_engine import TransformerEngineAttention
from app.model.layers.attend import Attend, TorchAttention

SHAPES = (
    *("2x4096x4096x16x16x64", "1x4096x4096x32x8x128", "1x4096x4096x32x4x128"),
    *("8x2048x2048x16x16x64", "1x8192x8192x32x8x128", "1x4096x8192x32x4x128"),
    *("1x4096x4096x16x16x192", "1x8192x16384x32x4x128"),
)
MIB = 2**20
REPEATS = 8
MOST_SCORES = 2**30  # entries of all score matrices, beyond which nothing is compared
Heads = tuple[Tensor, ...]


def kernels() -> Iterator[tuple[str, Attend]]:
    """Name and kernel."""
    for deterministic in (True, False):
        order = "ordered" if deterministic else "any order"
        yield f"torch, {order}", TorchAttention(deterministic)
        yield f"Transformer Engine, {order}", TransformerEngineAttention(deterministic)


def exact(heads: Heads, grad: Tensor) -> Heads:
    """Output and gradients in fp32, sequence by sequence."""
    found = []
    for q, k, v, own in zip(*heads, grad, strict=True):
        leaves = [each.float().requires_grad_() for each in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(0, 1) for each in leaves),
            attn_mask=torch.ones(len(q), len(k), dtype=torch.bool, device="cuda").tril(
                len(k) - len(q)
            ),
            enable_gqa=True,
        ).transpose(0, 1)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, own.float())))
    return tuple(torch.stack(each) for each in zip(*found, strict=True))


def measured(attend: Attend, heads: Heads, grad: Tensor, wanted: Heads | None) -> dict[str, object]:
    """A row of the table."""
    leaves = [each.detach().requires_grad_() for each in heads]

    def forward() -> Tensor:
        return attend(*leaves, window=None, documents=None, scale=None)

    out = forward()

    def backward() -> Heads:
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    first = backward()
    repeats = all(
        torch.equal(one, other)
        for _ in range(REPEATS)
        for one, other in zip(first, backward(), strict=True)
    )
    row: dict[str, object] = {"repeats": repeats, "backward_mib": round(scratch(backward) / MIB)}
    if wanted is not None:
        row["off"] = [
            float(f"{(one - other).norm() / other.norm():.2g}")
            for one, other in zip((out.detach(), *first), wanted, strict=True)
        ]
    row["forward_us"] = round(1e3 * gpu_time(forward)[0], 1)
    row["backward_us"] = round(1e3 * gpu_time(backward)[0], 1)
    return row


def scratch(run: Callable[[], Heads]) -> int:
    """Bytes alive at most while it runs, less those of its results."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = run()
    torch.cuda.synchronize()
    results = sum(each.nbytes for each in made)
    return torch.cuda.max_memory_allocated() - before - results


def main() -> None:
    """Print a line per shape and kernel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    given = parser.parse_args()
    rows = []
    for shape in given.shapes:
        batch, queries, keys, heads, kv_heads, width = map(int, shape.split("x"))
        generator = torch.Generator("cuda").manual_seed(0)
        q, grad, k, v = (
            torch.randn(batch, length, count, width, device="cuda", generator=generator).bfloat16()
            for length, count in ((queries, heads),) * 2 + ((keys, kv_heads),) * 2
        )
        scores = batch * heads * queries * keys
        wanted = exact((q, k, v), grad) if scores <= MOST_SCORES else None
        for name, attend in kernels():
            row: dict[str, object] = {"shape": shape, "kernel": name}
            try:
                row |= measured(attend, (q, k, v), grad, wanted)
            except RuntimeError as error:  # no kernel, or no memory
                row["refused"] = str(error).splitlines()[0][:200]
            rows.append(row)
            print(*(f"{key}={value}" for key, value in row.items()), sep="  ", flush=True)
            torch.cuda.empty_cache()
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
