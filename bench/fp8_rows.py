"""What quantises rows and weights of experts, kernel by kernel on one GPU, beside the same in bf16.

    python bench/fp8_rows.py [--alternatives] [--json FILE]

One line per piece and way: µs of one launch behind an emptied cache, half the spread of the
repeats, the bytes that must move at least, and GB/s of these. Shapes are those of a rank of
`qwen3_30b_a3b` with `parallel.ep=2`, 4096 tokens of either rank, random choices; the other rank's
tokens lie in this GPU's memory too. With --alternatives each piece is launched in other ways
besides: `NAME=VALUE` are constants of its module.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from timing import gpu_time
from torch import Tensor

from app.fp8.row_scaled import RowScaled, on_tensor_cores
from app.kernels import rows
from app.kernels.fp8 import swiglu as swiglu_in_8
from app.kernels.fp8 import weights
from app.kernels.quantise import empty_fp8_rows, quantise_rows
from app.kernels.rows import OfRanks
from app.kernels.swiglu import swiglu
from app.moe.dispatch.expert_rows import place_rows

RANKS, TOKENS, TOP_K, EXPERTS, WIDTH, HIDDEN = 2, 4096, 8, 128, 2048, 768
OWN = EXPERTS // RANKS  # experts of this rank
ROWS = RANKS * TOKENS * TOP_K  # that there is memory for
BF16, SCALE = 2, 4  # bytes
DEVICE = torch.device("cuda")
OTHER_TILES: tuple[dict[str, Any], ...] = (
    {"PROGRAMS": 8},
    {"PROGRAMS": 32},
    {"PROGRAMS": 64},
    {"TOGETHER": 8},
)
ALTERNATIVES: dict[str, tuple[ModuleType, tuple[dict[str, Any], ...]]] = {
    "gradients of rows": (
        rows,
        ({"REGISTERS": None}, {"REGISTERS": 64}, {"WIDE_BLOCK": 1024, "REGISTERS": 128}),
    ),
    "activation": (swiglu_in_8, OTHER_TILES),
    "gradient of activation": (swiglu_in_8, OTHER_TILES),
    "weights": (weights, ({"STAGES": 1}, {"WRITTEN": (128, 64), "WARPS": 8})),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement."""

    piece: str
    way: str
    us: float
    spread_us: float
    megabytes: float
    gb_per_s: float

    def line(self) -> str:
        """For a terminal."""
        moved = f"{self.megabytes:8.1f} MB {self.gb_per_s:7.0f} GB/s"
        return f"{self.piece:40} {self.way:28} {self.us:8.1f} ±{self.spread_us:5.1f} µs {moved}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to time."""

    name: str
    way: str  # bf16, or FP8
    run: Callable[[], object]
    moved: int  # bytes


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alternatives", action="store_true", help="other launches too")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    found = []
    for piece in pieces():
        for row in measured(piece, alternatives=args.alternatives):
            print(row.line(), flush=True)
            found.append(row)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


def measured(piece: Piece, alternatives: bool) -> Iterator[Row]:
    """As it is launched, and in other ways."""
    others: tuple[dict[str, Any], ...] = ()
    module, given = ALTERNATIVES.get(piece.name.split(",")[0], (None, ()))
    if alternatives and piece.way == "FP8":
        others = given
    for constants in ({}, *others):
        way = " ".join(f"{name}={value}" for name, value in constants.items()) or piece.way
        with patch.multiple(module, **constants) if constants else nullcontext():
            median, spread = gpu_time(piece.run)
        yield Row(
            piece.name,
            way,
            us=round(median * 1e3, 1),
            spread_us=round(spread * 1e3 / 2, 1),
            megabytes=round(piece.moved / 1e6, 1),
            gb_per_s=round(piece.moved / median / 1e6),
        )


def normal(*shape: int) -> Tensor:
    """In bf16."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def pieces() -> Iterator[Piece]:
    """In the order of a layer, then the weights."""
    source = normal(ROWS, WIDTH)
    copy = torch.empty_like(source)
    yield Piece("copy", "bf16", partial(copy.copy_, source), 2 * BF16 * source.numel())
    yield from of_tokens()
    yield from between_gemms()
    yield from at_home()
    yield from of_weights()


def of_tokens() -> Iterator[Piece]:
    """Tokens of all ranks to the rows of this one's experts, and gradients of their sums."""
    x_ND, tokens = normal(RANKS * TOKENS, WIDTH), RANKS * TOKENS
    scores_NE = torch.rand(tokens, EXPERTS, device=DEVICE)
    chosen_NK = scores_NE.topk(TOP_K, dim=1).indices.sort(dim=1).values.short()
    places = place_rows(chosen_NK, 0, OWN, num_rows=ROWS)
    row_of_NK, used = places.row_of_NK, int(places.ends_E[-1])
    addresses_P = torch.tensor([part.data_ptr() for part in x_ND.chunk(RANKS)], device=DEVICE)
    rows_RD, fp8_rows = normal(ROWS, WIDTH), empty_fp8_rows((ROWS, WIDTH), DEVICE)
    probs_NK = torch.rand(tokens, TOP_K, device=DEVICE)
    dots_NK, grad_RD = torch.empty_like(probs_NK), torch.empty_like(rows_RD)
    dots_P = torch.tensor([part.data_ptr() for part in dots_NK.chunk(RANKS)], device=DEVICE)

    def pull(fp8_rows: Any) -> Tensor:
        rows.spread_into(rows_RD, OfRanks(addresses_P), row_of_NK, fp8_rows)
        return rows_RD

    def pull_gradients(fp8_rows: Any) -> Tensor:
        rows.gradients_into(
            grad_RD,
            OfRanks(dots_P),
            OfRanks(addresses_P),
            rows_RD=rows_RD,
            probs_TK=probs_NK,
            row_of_TK=row_of_NK,
            fp8_rows=fp8_rows,
        )
        return grad_RD

    once = BF16 * x_ND.numel()
    for way, given, more in (("bf16", None, 0), ("FP8", fp8_rows, used * (WIDTH + SCALE))):
        moved = once + BF16 * used * WIDTH + more
        yield Piece("rows", way, partial(pull, given), moved)
        moved += BF16 * used * WIDTH
        yield Piece("gradients of rows", way, partial(pull_gradients, given), moved)
    yield Piece(
        "rows, on their own",
        "FP8",
        lambda: quantise_rows(rows_RD, places.ends_E[-1:]),
        used * (WIDTH * (BF16 + 1) + SCALE),
    )


def between_gemms() -> Iterator[Piece]:
    """silu(gate) · up, and its gradient."""
    used = ROWS // RANKS
    count = torch.tensor([used], dtype=torch.int32, device=DEVICE)
    both_R2F, grad_RF = normal(ROWS, 2 * HIDDEN).requires_grad_(), normal(ROWS, HIDDEN)
    act_RF, leaf = swiglu(both_R2F, count), both_R2F.detach()
    row = BF16 * used * HIDDEN
    yield Piece("activation", "bf16", lambda: swiglu(leaf, count), 3 * row)
    yield Piece(
        "activation",
        "FP8",
        lambda: swiglu_in_8.swiglu_rows(leaf, count),
        3 * row + used * (HIDDEN + SCALE),
    )
    yield Piece(
        "gradient of activation",
        "bf16",
        lambda: torch.autograd.grad(act_RF, both_R2F, grad_RF, retain_graph=True),
        5 * row,
    )
    yield Piece(
        "gradient of activation",
        "FP8",
        lambda: swiglu_in_8.swiglu_rows_gradient(grad_RF, leaf, count),
        5 * row + used * (2 * HIDDEN + SCALE),
    )


def at_home() -> Iterator[Piece]:
    """Gradients of the sums of one rank's tokens, whose experts are all its own."""
    grad_TD, rows_RD = normal(TOKENS, WIDTH), normal(TOKENS * TOP_K, WIDTH)
    row_of_TK = torch.randperm(TOKENS * TOP_K, device=DEVICE).view(TOKENS, TOP_K)
    probs_TK = torch.rand(TOKENS, TOP_K, device=DEVICE)
    fp8_rows = empty_fp8_rows(rows_RD.shape, DEVICE)
    moved = BF16 * (grad_TD.numel() + 2 * rows_RD.numel())
    for way, given, more in (
        ("bf16", None, 0),
        ("FP8", fp8_rows, rows_RD.numel() + SCALE * len(rows_RD)),
    ):
        yield Piece(
            "gradients of rows at home",
            way,
            partial(rows.combine_gradients, grad_TD, rows_RD, probs_TK, row_of_TK, fp8_rows=given),
            moved + more,
        )


def of_weights() -> Iterator[Piece]:
    """Both copies of the weights of one layer's products: they are read once and written twice."""
    for width, made in ((WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH)):
        weight_EIO = normal(OWN, width, made)
        arithmetic = RowScaled(on_tensor_cores)
        held = arithmetic.weight(weight_EIO)
        moved = weight_EIO.numel() * (BF16 + 2) + SCALE * OWN * (width + made)
        yield Piece(
            f"weights, {OWN} x {width} x {made}",
            "FP8",
            partial(arithmetic.update_weight, weight_EIO, held),
            moved,
        )


if __name__ == "__main__":
    main()
