"""Products in FP8 with sizes in place of tensors (`app.model.fp8`); all sizes are bytes.

As on a GPU like Hopper, whose tensor cores take two copies of each matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.choices import Fp8Recipe

BLOCK = 128  # values that share a scale by the recipe `block`
SCALE = 4  # of a scale, fp32
# launches that quantise a matrix: of the first recipe those of its largest entry and its scale too
LAUNCHES = {Fp8Recipe.current: 4, Fp8Recipe.delayed: 1, Fp8Recipe.block: 1}
# the host's time for that in launches of other kernels, where backward takes three times as much as
# forward: by eager steps of `small` beside bf16 ones (docs/planning.md); that of `block`, one
# kernel too, is taken to be that of `delayed`
HOST_LAUNCHES = {Fp8Recipe.current: 2.7, Fp8Recipe.delayed: 1.7, Fp8Recipe.block: 1.7}
# times faster than in bf16 all linear layers and the head are, forward and both gradients with what
# they quantise, where no profile has their speeds: by whole steps of 16 layers as wide as
# llama3_8b's on two H200s (docs/fp8.md)
SPEEDUP = {Fp8Recipe.current: 1.65, Fp8Recipe.delayed: 1.7, Fp8Recipe.block: 1.4}
# of experts, without the gradients of weights: 32 × 1024 rows, 2048 -> 2 × 768 -> 2048, with what
# quantises rows on its own; a measured H200 (docs/fp8.md)
EXPERTS_SPEEDUP = 1.07
# bytes that quantising moves per 16-bit element: read once, and where the scale or the other
# direction asks for it twice; written in both directions
MOVED = {Fp8Recipe.current: 6, Fp8Recipe.delayed: 4, Fp8Recipe.block: 6}
MOVED_ROWS = 3  # of rows with a scale each, which one copy does for


@dataclass(frozen=True, slots=True)
class Fp8Work:
    """How a product is computed in FP8, and how many elements it quantises."""

    recipe: Fp8Recipe | None  # None: of routed experts, whose rows have a scale each
    inputs: int  # of what it multiplies with its weight, forward
    grads: int  # of its output's gradient, and of inputs that backward quantises once more

    @property
    def speedups(self) -> tuple[float, float]:
        """Where no profile has its speed, how many times faster than in the type of parameters its
        products are: of output and of the gradient of what it reads; of the weight's gradient.
        """
        if self.recipe is None:
            return EXPERTS_SPEEDUP, 1.0
        return SPEEDUP[self.recipe], SPEEDUP[self.recipe]

    @property
    def host_launches(self) -> float:
        """The host's time for quantising, in launches, beyond one for each kernel of it."""
        if self.recipe is None:
            return 0.0
        return HOST_LAUNCHES[self.recipe] - LAUNCHES[self.recipe]


@dataclass(frozen=True, slots=True)
class Copies:
    """A matrix in FP8: along its rows, and along its columns; 0: there are none."""

    rows: int
    columns: int

    @property
    def both(self) -> int:
        """While it is being quantised, and as long as both are read."""
        return self.rows + self.columns

    @classmethod
    def of(cls, recipe: Fp8Recipe, rows: int, columns: int) -> Copies:
        """Of an input or of an output's gradient."""
        if recipe is not Fp8Recipe.block:  # one scale for both
            return cls(rows * columns, rows * columns + SCALE)
        along_rows = -(-columns // BLOCK) * _padded(rows)
        along_columns = -(-rows // BLOCK) * _padded(columns)
        return cls(rows * columns + SCALE * along_rows, rows * columns + SCALE * along_columns)

    @classmethod
    def of_experts(cls, experts: int, width: int, made: int) -> Copies:
        """Of the weights of experts, each `width` × `made`: a scale per row, and per column."""
        size = experts * width * made
        return cls(size + SCALE * experts * width, size + SCALE * experts * made)

    @classmethod
    def of_weight(cls, recipe: Fp8Recipe, rows: int, columns: int) -> Copies:
        """Of a weight."""
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
    """What a linear layer's kernels read in place of its rows and of their gradient: copies in
    FP8, or these themselves.
    """

    given: Copies = NO_COPIES  # of the rows that it multiplies with its weight
    back: Copies = NO_COPIES  # of the gradient of those that it makes
    launches: int = 0  # that quantise the rows
    fp8: Fp8Work | None = None  # None: all are in the type of parameters

    @classmethod
    def of(cls, recipe: Fp8Recipe | None, rows: int, made: int, taken: int) -> GemmOperands:
        """Of so many rows of width `taken`, and the gradient of those of width `made`; None: in
        the type of parameters.
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
        """Of the rows, for the gradient of the weight; None: they themselves are kept."""
        return None if self.fp8 is None else self.given.columns

    @property
    def waiting(self) -> int | None:
        """Of their gradient, for a split backward; None: it waits itself."""
        return None if self.fp8 is None else self.back.columns

    @property
    def quantised_again(self) -> Fp8Work | None:
        """Where backward quantises the rows once more, as they are not kept in FP8."""
        how = self.fp8
        return None if how is None else replace(how, grads=how.grads + how.inputs)


def rows_in_8(rows: int, columns: int) -> int:
    """Rows for experts, or the gradient of what these make: a scale each, one copy."""
    return rows * columns + SCALE * rows


def _padded(count: int) -> int:
    """Scales lie in fours."""
    return -(-count // 4) * 4
