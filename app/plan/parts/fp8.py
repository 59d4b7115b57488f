"""FP8 GEMMs: bytes of copies, host time and speeds (`app.fp8`).

As on Hopper GPUs, whose tensor cores need a row-wise and a column-wise copy of each matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.choices import Fp8Recipe

SCALE = 4  # bytes of a scale, fp32
# Speed over bf16 of grouped GEMMs without weight gradients, quantization included: 32 × 1024 rows,
# 2048 -> 2 × 768 -> 2048, on an H200 (docs/fp8.md).
EXPERTS_SPEEDUP = 1.07
MOVED_ROWS = 3  # bytes per element of rows with a scale each, of which one copy is written


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """What plans assume of a recipe."""

    cost: str  # in words, for who chooses between recipes
    # kernel launches that quantize a matrix; recipe `current` also finds the largest entry
    launches: int
    # host time of quantizing, in launches of other kernels; backward takes three times as much as
    # forward. Measured by eager steps of `small` against bf16 (docs/planning.md)
    host_launches: float
    # Speed over bf16 of all linear layers and the head, forward and both gradients, quantization
    # included; used without a profile. By end-to-end steps of 16 layers as wide as llama3_8b's on
    # two H200s (docs/fp8.md).
    speedup: float
    # bytes that quantizing moves per 16-bit element: one read, or two if the scale or the other
    # direction needs a second pass, and one write per direction
    moved: int
    block: int | None = None  # elements that share a scale; None: all of a matrix


RECIPES = {
    Fp8Recipe.current: RecipeFacts(
        "each matrix has one scale, by its largest entry",
        launches=4,
        host_launches=2.7,
        speedup=1.65,
        moved=6,
    ),
    Fp8Recipe.delayed: RecipeFacts(
        "entries beyond the largest of earlier steps are clipped",
        launches=1,
        host_launches=1.7,
        speedup=1.7,
        moved=4,
    ),
    Fp8Recipe.block: RecipeFacts(
        "gradients in E4M3, blocks with scales of their own",
        launches=1,
        host_launches=1.7,  # one kernel too, assumed to be like `delayed`
        speedup=1.4,
        moved=6,
        block=128,
    ),
}


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
        speedup = RECIPES[self.recipe].speedup
        return speedup, speedup

    @property
    def host_launches(self) -> float:
        """Host time of quantizing, in launches, beyond one for each of its kernels."""
        if self.recipe is None:
            return 0.0
        facts = RECIPES[self.recipe]
        return facts.host_launches - facts.launches


def fp8_copy(recipe: Fp8Recipe, elements: int) -> int:
    """Return bytes of one FP8 copy: an element each, and the scales of blocks."""
    block = RECIPES[recipe].block
    return elements + (0 if block is None else SCALE * elements // block)
