"""Kernels of a layer on one GPU against plain torch, torch.compile and Transformer Engine.

    python bench/layer_kernels.py [--json FILE]

One row per piece and alternative: µs of forward and of forward with backward (medians), GB/s that
the values which must be read and written make of these, and the largest difference of the outputs
from plain torch's. bf16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import gpu_time
from torch import Tensor

from app.config.attention import Rope
from app.kernels.attention.heads import HeadNorms, split_and_rotate
from app.kernels.partial_sums import add_summed
from app.kernels.rms_norm import rms_norm, rms_norm_beside
from app.kernels.swiglu import swiglu
from app.model.layers.layers import RotaryTable, rotate

try:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
except ImportError:
    te = None

EPS, THETA, SEQUENCES, LENGTH = 1e-5, 10000.0, 2, 4096
FOREIGN = ("compile", "transformer_engine")  # ways that may fail without ending the rest
Outputs = tuple[Tensor, ...]
Function = Callable[..., Outputs]


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to compute, and ways to do it."""

    name: str
    inputs: Outputs
    forward_bytes: int  # at least to be moved
    backward_bytes: int
    ways: dict[str, Function]


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement."""

    piece: str
    way: str
    forward_us: float
    forward_spread_us: float
    both_us: float  # forward and backward
    both_spread_us: float
    forward_gbps: float
    both_gbps: float
    difference: float  # of the outputs from plain torch's

    def line(self) -> str:
        """For a terminal."""
        times = (
            f"{self.forward_us:9.1f} ±{self.forward_spread_us:6.1f} {self.both_us:9.1f} "
            f"±{self.both_spread_us:6.1f}"
        )
        return (
            f"{self.piece:28} {self.way:20} {times} {self.forward_gbps:7.0f} "
            f"{self.both_gbps:7.0f} {self.difference:9.1e}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    if te is None:
        print("transformer_engine: not installed")
    print(
        f"{'piece':28} {'way':20} {'forward µs':>17} {'with backward µs':>17} {'GB/s':>7} "
        f"{'GB/s':>7} {'off by':>9}"
    )
    rows = []
    for piece in pieces():
        for way in piece.ways:
            try:
                rows.append(measured(piece, way))
            except Exception as error:
                if way not in FOREIGN:
                    raise
                print(f"{piece.name:28} {way:20} {type(error).__name__}: {error}".splitlines()[0])
            else:
                print(rows[-1].line(), flush=True)
    if args.json:
        where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.json.write_text(
            json.dumps({**where, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


def measured(piece: Piece, way: str) -> Row:
    """Times of a piece done in one way."""
    function, plain = piece.ways[way], piece.ways["torch"]
    with torch.no_grad():
        outs, expected = function(*piece.inputs), plain(*piece.inputs)
        difference = max(
            (out - right).abs().max().item() for out, right in zip(outs, expected, strict=True)
        )
        forward, forward_spread = (1000 * ms for ms in gpu_time(lambda: function(*piece.inputs)))
    leaves, grads = (
        [tensor.clone().requires_grad_() for tensor in piece.inputs],
        tuple(map(torch.randn_like, outs)),
    )
    both, both_spread = (
        1000 * ms
        for ms in gpu_time(  # a gradient may go to a sum instead
            lambda: torch.autograd.grad(function(*leaves), leaves, grads, allow_unused=True)
        )
    )
    rates = (
        piece.forward_bytes / forward / 1000,
        (piece.forward_bytes + piece.backward_bytes) / both / 1000,
    )
    return Row(piece.name, way, forward, forward_spread, both, both_spread, *rates, difference)


def ways(kernel: Function, plain: Function, other: Function | None) -> dict[str, Function]:
    """By name; Transformer Engine's where there is one."""
    found = {"kernel": kernel, "torch": plain, "compile": torch.compile(plain, dynamic=False)}
    return found if other is None else {**found, "transformer_engine": other}


def pieces() -> Iterator[Piece]:
    """All, one after the other."""
    for rows, width in ((8192, 2816), (49152, 512)):
        yield swiglu_piece(rows, width)
    for heads, groups, width, norms in (
        (16, 16, 64, False),
        (16, 4, 64, False),
        (32, 8, 128, False),
        (32, 4, 128, True),
    ):
        yield heads_piece(heads, groups, width, norms=norms)
    for width in (1024, 2048, 4096):
        yield norm_piece(8192, width)
        yield residual_piece(8192, width)


def normal(*shape: int) -> Tensor:
    """bf16."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def swiglu_piece(rows: int, width: int) -> Piece:
    """silu(gate) · up."""

    def plain(both: Tensor) -> Outputs:
        gate, up = both.chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    engine = None
    if te is not None:
        act = te.ops.SwiGLU()
        engine = lambda both: (act(both),)  # noqa: E731
    values = 2 * rows * width
    name = f"swiglu {rows}×2·{width}"
    return Piece(
        name,
        (normal(rows, 2 * width),),
        3 * values,
        backward_bytes=5 * values,
        ways=ways(lambda both: (swiglu(both),), plain, engine),
    )


def heads_piece(heads: int, groups: int, width: int, norms: bool) -> Piece:
    """Queries, keys and values with rotary positions."""
    queries = heads // groups
    table = RotaryTable.of(torch.arange(LENGTH, device="cuda")[None], Rope(width, THETA))

    def split(qkv: Tensor) -> Outputs:
        q, k, v = qkv.unflatten(-1, (groups, queries + 2, width)).split((queries, 1, 1), dim=3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)

    def plain(qkv: Tensor, *weights: Tensor) -> Outputs:
        *pair, v = split(qkv)
        if norms:
            pair = [
                F.rms_norm(x, (width,), weight, EPS)
                for x, weight in zip(pair, weights, strict=True)
            ]
        return (*(rotate(x, table) for x in pair), v)

    def kernel(qkv: Tensor, *weights: Tensor) -> Outputs:
        given = HeadNorms(*weights, EPS) if norms else None
        return split_and_rotate(
            qkv,
            table.cos_BS1H,
            table.sin_BS1H,
            num_kv_heads=groups,
            queries_per_kv=queries,
            norms=given,
        )

    engine = None if te is None or norms else engine_rotation(split, width)
    inputs = (
        normal(SEQUENCES, LENGTH, groups * (queries + 2) * width),
        *(normal(width) for _ in range(2 * norms)),
    )
    tables, values = 2 * 4 * LENGTH * width, 2 * inputs[0].numel()
    name = f"heads {heads}/{groups}×{width}{' norms' if norms else ''}"
    return Piece(
        name,
        inputs,
        2 * values + tables,
        backward_bytes=(2 + norms) * values + tables,
        ways=ways(kernel, plain, engine),
    )


def engine_rotation(split: Function, width: int) -> Function:
    """Transformer Engine's fused rotation, after a split."""
    exponent = torch.arange(0, width, 2, device="cuda") / width
    angles_SH = (torch.arange(LENGTH, device="cuda")[:, None] * THETA**-exponent).repeat(1, 2)
    angles_S11H = angles_SH[:, None, None].contiguous()

    def function(qkv: Tensor) -> Outputs:
        *pair, v = split(qkv)
        return (
            *(apply_rotary_pos_emb(x, angles_S11H, tensor_format="bshd", fused=True) for x in pair),
            v,
        )

    return function


def norm_piece(rows: int, width: int) -> Piece:
    """RMSNorm."""

    def plain(x: Tensor, weight: Tensor) -> Outputs:
        return (F.rms_norm(x, (width,), weight, EPS),)

    engine = None
    if te is not None:
        module = te.RMSNorm(width, eps=EPS, params_dtype=torch.bfloat16, device="cuda")
        engine = lambda x, weight: (torch.func.functional_call(module, {"weight": weight}, (x,)),)  # noqa: E731
    values = 2 * rows * width
    choices = ways(lambda x, weight: (rms_norm(x, weight, EPS),), plain, engine)
    return Piece(
        f"rms_norm {rows}×{width}",
        (normal(rows, width), normal(width)),
        2 * values,
        backward_bytes=3 * values,
        ways=choices,
    )


def residual_piece(rows: int, width: int) -> Piece:
    """RMSNorm with the residual that passes it by, whose gradients meet; the weight's is added to a
    sum in fp32 by the kernel that sums its parts, or by torch behind it.
    """
    sums = torch.zeros(width, device="cuda")

    def plain(x: Tensor, weight: Tensor) -> Outputs:
        return x, F.rms_norm(x, (width,), weight, EPS)

    def apart(x: Tensor, weight: Tensor) -> Outputs:
        return x, rms_norm(x, weight, EPS)

    def into_sums(x: Tensor, weight: Tensor) -> Outputs:
        return rms_norm_beside(x, weight, EPS, lambda parts: add_summed(sums, parts))

    def parts_by_torch(x: Tensor, weight: Tensor) -> Outputs:
        def take(parts: Tensor) -> None:
            sums.add_(parts.sum(0).to(weight.dtype))

        return rms_norm_beside(x, weight, EPS, take)

    values = 2 * rows * width
    choices = {
        "kernel": lambda x, weight: rms_norm_beside(x, weight, EPS),
        "kernel, into a sum": into_sums,
        "kernel, torch sums": parts_by_torch,
        "kernel, sum behind": apart,
        "torch": plain,
    }
    return Piece(
        f"rms_norm beside a residual {rows}×{width}",
        (normal(rows, width), normal(width)),
        2 * values,
        backward_bytes=4 * values,
        ways=choices,
    )


if __name__ == "__main__":
    main()
