"""How kernels cut their work, where memory depends on it. Plans read this too: there is no torch.

Constants, not a device's properties, where they fix the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

MULTIPROCESSORS = 132  # of an H100 or H200
WARPS = 16  # that each of them has of a norm's backward

NORM_TILE = 1024  # values that a program of a norm holds at least
NORM_PER_WARP = 512  # of them: 16 per thread
# values of half a head that a program holds: 8 per thread, so 16 bytes of bf16
HEAD_TILE = 1024
HEADS = 6  # of a program at least, where there are so many: they share one read of the tables

PARTS = 3  # in bf16, which add up to fp32: as many bits together

ROW_BLOCK = 2048  # columns of a token's rows that a program has
ROW_PER_WARP = 256  # 8 values, 16 bytes of bf16, for each of 32 threads


def cdiv(count: int, size: int) -> int:
    """Parts of at most `size` that hold `count`. Triton's own takes 2 µs: it serves kernels too."""
    return -(-count // size)


def block_of(width: int) -> int:
    """The power of two that holds `width` values."""
    return 1 << max(0, width - 1).bit_length()


def row_columns(tokens: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Grid, columns of a program and its warps, when each program has some columns of one token."""
    block = min(block_of(width), ROW_BLOCK)
    return (tokens, cdiv(width, block)), block, row_warps(block)


def row_warps(values: int, most: int = 8) -> int:
    """Warps of a program for so many values of rows."""
    return min(most, max(1, values // ROW_PER_WARP))


@dataclass(frozen=True, slots=True)
class NormTiling:
    """What a program of `app.kernels.rms_norm` holds."""

    height: int  # rows
    columns: int  # of each, all of them
    warps: int

    def tiles(self, rows: int) -> int:
        """Tiles that so many rows make."""
        return -(-rows // self.height)

    def programs(self, rows: int) -> int:
        """Programs of backward, each of which sums the weight's gradient over its tiles."""
        return min(self.tiles(rows), MULTIPROCESSORS * max(1, WARPS // self.warps))


def norm_tiling(width: int) -> NormTiling:
    """For rows of so many values."""
    columns = block_of(width)
    size = max(NORM_TILE, columns)
    return NormTiling(size // columns, columns, min(16, size // NORM_PER_WARP))


@dataclass(frozen=True, slots=True)
class HeadTiling:
    """What a program of `app.kernels.attention.heads` holds."""

    height: int  # tokens
    taken: int  # key/value heads, each with its query heads
    half: int  # columns of half a head

    def grid(self, tokens: int, kv_heads: int) -> int:
        """Programs, each of which sums the norms' gradients over what it holds."""
        return -(-tokens // self.height) * (kv_heads // self.taken)


def head_tiling(kv_heads: int, queries_per_kv: int, width: int) -> HeadTiling:
    """For heads of so many values."""
    wanted = -(-HEADS // (queries_per_kv + 2))
    half = block_of(width // 2)
    return HeadTiling(max(1, HEAD_TILE // half), wanted if kv_heads % wanted == 0 else 1, half)
