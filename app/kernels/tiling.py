"""Tile sizes of kernels as far as memory depends on them. Plans read them too, so there is no
torch.

Constants instead of device properties wherever they fix the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

MULTIPROCESSORS = 132  # of an H100 or H200
WARPS = 16  # of a norm's backward per multiprocessor

NORM_TILE = 1024  # values per program of a norm, at least
NORM_PER_WARP = 512  # of them: 16 per thread
# values of half a head that a program holds: 8 per thread, so 16 bytes of bf16
HEAD_TILE = 1024
HEADS = 6  # at least, per program, if there are that many: they share one read of the tables

ONES = 16  # columns of ones in a grouped GEMM that adds up rows: whole 16 bytes in any type
PARTS = 3  # bf16 parts whose sum is the fp32 value: 3 · 8 bits

CONVOLVED = 64  # tokens of a program of a short convolution, which sums the taps' gradients

ROW_BLOCK = 2048  # columns of a token's rows that a program has
ROW_PER_WARP = 256  # 8 values, 16 bytes of bf16, for each of 32 threads


def cdiv(count: int, size: int) -> int:
    """Return the number of parts of at most `size` that hold `count`.

    Triton's own takes 2 µs, so kernels' callers use this one.
    """
    return -(-count // size)


def block_of(width: int) -> int:
    """Return the power of two that holds `width` values."""
    return 1 << max(0, width - 1).bit_length()


def row_columns(tokens: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Return grid, columns and warps of a program, if each program has some columns of one
    token.
    """
    block = min(block_of(width), ROW_BLOCK)
    return (tokens, cdiv(width, block)), block, row_warps(block)


def row_warps(values: int, most: int = 8) -> int:
    """Return the warps of a program for this many values of rows."""
    return min(most, max(1, values // ROW_PER_WARP))


@dataclass(frozen=True, slots=True)
class NormTiling:
    """Tile of a program of `app.kernels.rms_norm`."""

    height: int  # rows
    columns: int  # of each, all of them
    warps: int

    def tiles(self, rows: int) -> int:
        """Return the number of tiles of this many rows."""
        return -(-rows // self.height)

    def programs(self, rows: int) -> int:
        """Return the number of backward programs, each of which sums the weight's gradient over its
        tiles.
        """
        return min(self.tiles(rows), MULTIPROCESSORS * max(1, WARPS // self.warps))


def norm_tiling(width: int) -> NormTiling:
    """Return the tiling for rows of this width."""
    columns = block_of(width)
    size = max(NORM_TILE, columns)
    return NormTiling(size // columns, columns, min(16, size // NORM_PER_WARP))


@dataclass(frozen=True, slots=True)
class HeadTiling:
    """Tile of a program of `app.kernels.attention.heads`."""

    height: int  # tokens
    taken: int  # key/value heads, each with its query heads
    half: int  # columns of half a head

    def grid(self, tokens: int, kv_heads: int) -> int:
        """Return the grid; each program sums the norms' gradients over its tile."""
        return -(-tokens // self.height) * (kv_heads // self.taken)


def head_tiling(kv_heads: int, queries_per_kv: int, width: int) -> HeadTiling:
    """Return the tiling for heads of this width."""
    wanted = -(-HEADS // (queries_per_kv + 2))
    half = block_of(width // 2)
    return HeadTiling(max(1, HEAD_TILE // half), wanted if kv_heads % wanted == 0 else 1, half)
