"""FP8 GEMMs with sizes in place of tensors (`app.fp8`); all sizes are bytes.

As on Hopper GPUs, whose tensor cores need a row-wise and a column-wise copy of each matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.choices import Fp8Recipe

BLOCK = 128  # values that share a scale in the recipe `block`
SCALE = 4  # bytes of a scale, fp32
# kernel launches that quantize a matrix; recipe `current` also finds the largest entry
LAUNCHES = {Fp8Recipe.current: 4, Fp8Recipe.delayed: 1, Fp8Recipe.block: 1}
# host time of quantizing, in launches of other kernels; backward takes three times as much as
# forward. Measured by eager steps of `small` against bf16 (docs/planning.md); `block`, one kernel
# too, is assumed to be like `delayed`.
HOST_LAUNCHES = {Fp8Recipe.current: 2.7, Fp8Recipe.delayed: 1.7, Fp8Recipe.block: 1.7}
# Speed over bf16 of all linear layers and the head, forward and both gradients, quantization
# included; used without a profile. By end-to-end steps of 16 layers as wide as llama3_8b's on two
# H200s (docs/fp8.md).
SPEEDUP = {Fp8Recipe.current: 1.65, Fp8Recipe.delayed: 1.7, Fp8Recipe.block: 1.4}
# Speed over bf16 of grouped GEMMs without weight gradients, quantization included: 32 × 1024 rows,
# 2048 -> 2 × 768 -> 2048, on an H200 (docs/fp8.md).
EXPERTS_SPEEDUP = 1.07
# bytes that quantizing moves per 16-bit element: one read, or two if the scale or the other
# direction needs a second pass, and one write per direction
MOVED = {Fp8Recipe.current: 6, Fp8Recipe.delayed: 4, Fp8Recipe.block: 6}
MOVED_ROWS = 3  # of rows with a scale each, of which one copy is written


@dataclass(frozen=True, slots=True)
class Fp8Work:
    """Recipe of an operation's FP8 GEMMs, and elements that it quantizes."""

    recipe: Fp8Recipe | None  # None for routed experts, with one scale per row
    inputs: int  # elements of the forward input
    grads: int  # elements of the output gradient, and of inputs that backward quantizes again

    @property
    def speedups(self) -> tuple[float, float]:
        """Speedup over 16 bits without a profile: (output and input gradient, weight gradient)."""
        if self.recipe is None:
            return EXPERTS_SPEEDUP, 1.0
        return SPEEDUP[self.recipe], SPEEDUP[self.recipe]

    @property
    def host_launches(self) -> float:
        """Host time of quantizing, in launches, beyond one for each of its kernels."""
        if self.recipe is None:
            return 0.0
        return HOST_LAUNCHES[self.recipe] - LAUNCHES[self.recipe]


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes of a matrix's FP8 copies, row-wise and column-wise; 0 without that copy."""

    rows: int
    columns: int

    @property
    def both(self) -> int:
        """Bytes of both copies."""
        return self.rows + self.columns

    @classmethod
    def of(cls, recipe: Fp8Recipe, rows: int, columns: int) -> Copies:
        """Return the copies of an input or of an output gradient."""
        if recipe is not Fp8Recipe.block:  # one scale per tensor
            return cls(rows * columns, rows * columns + SCALE)
        along_rows = -(-columns // BLOCK) * _padded(rows)
        along_columns = -(-rows // BLOCK) * _padded(columns)
        return cls(rows * columns + SCALE * along_rows, rows * columns + SCALE * along_columns)

    @classmethod
    def of_experts(cls, experts: int, width: int, made: int) -> Copies:
        """Return the copies of experts' weights, `width` × `made` each: one scale per row or
        column.
        """
        size = experts * width * made
        return cls(size + SCALE * experts * width, size + SCALE * experts * made)

    @classmethod
    def of_weight(cls, recipe: Fp8Recipe, rows: int, columns: int) -> Copies:
        """Return the copies of a weight."""
        if recipe is not Fp8Recipe.block:
            return cls.of(recipe, rows, columns)
        down, across = -(-rows // BLOCK), -(-columns // BLOCK)
        return cls(
            rows * columns + SCALE * down * _padded(across),
            rows * columns + SCALE * across * _padded(down),
        )


NO_COPIES = Copies(0, 0)


@dataclass(frozen=True, slots=True)
class GemmOperands:
    """Memory of the FP8 operands that a linear layer's GEMMs read."""

    given: Copies = NO_COPIES  # of the input
    back: Copies = NO_COPIES  # of the output gradient
    launches: int = 0  # kernel launches that quantize the input
    fp8: Fp8Work | None = None  # None: operands keep the type of parameters

    @classmethod
    def of(cls, recipe: Fp8Recipe | None, rows: int, made: int, taken: int) -> GemmOperands:
        """Return the operands of `rows` inputs of width `taken` and outputs of width `made`.

        Recipe None keeps the type of parameters.
        """
        if recipe is None:
            return cls()
        return cls(
            Copies.of(recipe, rows, taken),
            Copies.of(recipe, rows, made),
            LAUNCHES[recipe],
            Fp8Work(recipe, inputs=rows * taken, grads=rows * made),
        )

    @property
    def kept(self) -> int | None:
        """Bytes of the FP8 input saved for the weight gradient.

        None if the input itself is saved.
        """
        return None if self.fp8 is None else self.given.columns

    @property
    def waiting(self) -> int | None:
        """Bytes of the FP8 output gradient that waits in a split backward.

        None if the gradient itself waits.
        """
        return None if self.fp8 is None else self.back.columns

    @property
    def quantised_again(self) -> Fp8Work | None:
        """FP8 work if backward quantizes the input again, as its FP8 copy is not saved."""
        how = self.fp8
        return None if how is None else replace(how, grads=how.grads + how.inputs)


def rows_in_fp8(rows: int, columns: int) -> int:
    """Return bytes of an FP8 copy of experts' inputs or output gradients: one scale per row."""
    return rows * columns + SCALE * rows


def _padded(count: int) -> int:
    """Return a count of scales, padded to a multiple of 4."""
    return -(-count // 4) * 4
