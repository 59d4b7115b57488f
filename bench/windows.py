"""Attention with a sliding window beside attention to all tokens: time and accuracy.

    python bench/windows.py [--window 1024] [--shapes 1x8192x32x8x128 …] [--json OUT.json]

A shape is sequences, tokens, query heads, key/value heads, head width. Prints for every kernel the
times of forward and backward, medians of cold runs in µs, with a window and without, their ratio,
the ratio of the pairs of a query and a key, and how far output and gradients with a window are from
fp32 with a stored mask, norms of the difference over norms.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from timing import gpu_time
from torch import Tensor

from app.errors import ConfigError
from app.model.layers.attend import Attend, TorchAttention, visible
from app.plan.parts.attention import twice_the_pairs

SHAPES = ("1x8192x32x8x128", "1x8192x16x16x64", "2x4096x32x8x128")
Heads = tuple[Tensor, ...]


def kernels() -> Iterator[tuple[str, Attend]]:
    """Name and kernel; without Transformer Engine, those of torch."""
    for deterministic in (True, False):
        order = "ordered" if deterministic else "any order"
        yield f"torch, {order}", TorchAttention(deterministic)
        try:
            from app.model.attention.transformer_engine import TransformerEngineAttention

            yield f"Transformer Engine, {order}", TransformerEngineAttention(deterministic)
        except (ImportError, ConfigError):
            continue


def results(attend: Attend, heads: Heads, grad: Tensor, window: int | None) -> Heads:
    """Output and gradients of queries, keys and values."""
    leaves = [each.detach().requires_grad_() for each in heads]
    out = attend(*leaves, window=window, documents=None, scale=None)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def exact(heads: Heads, grad: Tensor, window: int) -> Heads:
    """The same in fp32 of the first sequence and key/value head, with a stored mask."""
    q, k, v = heads
    shared = q.shape[2] // k.shape[2]
    leaves = [
        each[:1, :, :count].float().requires_grad_()
        for each, count in ((q, shared), (k, 1), (v, 1))
    ]
    length = q.shape[1]
    seen = visible(1, length, length, q.device, window, None)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in leaves), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad[:1, :, :shared].float()))


def times(attend: Attend, heads: Heads, grad: Tensor, window: int | None) -> tuple[float, float]:
    """µs of forward and of backward."""
    leaves = [each.detach().requires_grad_() for each in heads]

    def forward() -> Tensor:
        return attend(*leaves, window=window, documents=None, scale=None)

    out = forward()
    backward = gpu_time(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))[0]
    return round(1e3 * gpu_time(forward)[0], 1), round(1e3 * backward, 1)


def measured(attend: Attend, heads: Heads, grad: Tensor, window: int) -> dict[str, object]:
    """A row of the table."""
    found, wanted = results(attend, heads, grad, window), exact(heads, grad, window)
    off = [
        float(f"{(one[:1, :, : other.shape[2]].float() - other).norm() / other.norm():.2g}")
        for one, other in zip(found, wanted, strict=True)
    ]
    short, whole = (times(attend, heads, grad, size) for size in (window, None))
    return {
        "window_us": short,
        "full_us": whole,
        "ratio": round(sum(short) / sum(whole), 3),
        "off": off,
    }


def main() -> None:
    """Print a line per shape and kernel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    given = parser.parse_args()
    rows = []
    for shape in given.shapes:
        batch, length, heads, kv_heads, width = map(int, shape.split("x"))
        generator = torch.Generator("cuda").manual_seed(0)
        q, grad, k, v = (
            torch.randn(batch, length, count, width, device="cuda", generator=generator).bfloat16()
            for count in (heads, heads, kv_heads, kv_heads)
        )
        pairs = [twice_the_pairs(length, length, size) for size in (given.window, None)]
        for name, attend in kernels():
            row: dict[str, object] = {"shape": shape, "window": given.window, "kernel": name}
            row["pairs"] = round(pairs[0] / pairs[1], 3)
            try:
                row |= measured(attend, (q, k, v), grad, given.window)
            except RuntimeError as error:  # no kernel, or no memory
                row["refused"] = str(error).splitlines()[0][:200]
            rows.append(row)
            print(*(f"{key}={value}" for key, value in row.items()), sep="  ", flush=True)
            torch.cuda.empty_cache()
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
