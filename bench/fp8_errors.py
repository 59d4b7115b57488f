"""How far off fp64 the products of each layer are, of entries as they come up in training.

    python bench/fp8_errors.py [--steps 60] [override …]

Trains on text in FP8 (recipe `delayed`), and takes what comes into every linear layer in the
last step's last microbatch, its weight and its output's gradient. Of these it prints a row per
layer: for bf16 and each recipe, norms of the difference over norms of the exact ones, in percent,
of output, input gradient and weight gradient. Scales of `delayed` are those that the run had.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from app.choices import Fp8Recipe
from app.cli.options.compose import load_overrides
from app.config import Run
from app.engine.build import build_engine
from app.engine.fp8 import arithmetic_maker
from app.engine.ranks.groups import create_groups, process_world
from app.engine.report.metrics import Stopwatch
from app.engine.run.trainer import Trainer
from app.engine.start.start import choose_device, find_start, load_all_data
from app.engine.step.engine import Engine
from app.fp8.delayed import EACH, GRAD, INPUT, WEIGHT
from app.fp8.linear import Fp8Layers, Fp8Linear
from app.fp8.quantised import Fp8Arithmetic, Quantised
from app.planner.plan import Plan

FIXED = ("precision=bf16", "precision.fp8.recipe=delayed", "parallel.dp=1", "log=none",
         "checkpoint=none", "train.eval_interval=0", "optim.decay_steps=1000")  # fmt: skip
CHOSEN = ("model=dense_tiny", "data=text", "data.path=app/**/*.py")
Three = tuple[Tensor, Tensor, Tensor]  # output, input gradient, weight gradient


class Seen:
    """Matrices of a layer, and what they have become; of the last time, by kind."""

    def __init__(self, linear: Fp8Linear) -> None:
        """Watch a layer from here on; its weight is that of the next forward."""
        self.matrices = [torch.empty(0)] * EACH
        self.made: dict[int, Quantised] = {}
        self._take(WEIGHT, linear.weight, linear.held)
        linear.quantised_input = partial(self._operand, INPUT, linear.quantised_input)
        linear.quantised_grad = partial(self._operand, GRAD, linear.quantised_grad)

    def _operand(
        self, which: int, quantised: Callable[[Tensor], Quantised], x: Tensor
    ) -> Quantised:
        made = quantised(x)
        self._take(which, x.flatten(0, -2), made)
        return made

    def _take(self, which: int, matrix: Tensor, made: Quantised) -> None:
        self.matrices[which], self.made[which] = matrix.detach().clone(), made


def gemms(arithmetic: Fp8Arithmetic, x: Quantised, weight: Quantised, grad: Quantised) -> Three:
    """Of a recipe."""
    wide = torch.float32
    return (
        arithmetic.output(x, weight, wide),
        arithmetic.input_grad(grad, weight, wide),
        arithmetic.weight_grad(grad, x, wide),
    )


def plain_gemms(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """In the type of what they are given."""
    return x @ weight.T, grad @ weight, grad.T @ x


def off(found: Three, exact: Three) -> str:
    """In percent."""
    return " / ".join(
        f"{100 * ((mine.double() - wanted).norm() / wanted.norm()).item():.1f}"
        for mine, wanted in zip(found, exact, strict=True)
    )


def train(run: Run, engine: Engine, steps: int) -> dict[str, Seen]:
    """What layers have had in the last of these steps."""
    data = load_all_data(run, engine.groups, 0)
    trainer, stopwatch = Trainer(engine, data, find_start(run, None)), Stopwatch()
    for _ in range(steps - 1):
        trainer.step(stopwatch)
    fp8 = engine.state(Fp8Layers)
    assert fp8 is not None, "the run has a recipe"
    seen = {name: Seen(linear) for name, linear in fp8.linears.items()}
    trainer.step(stopwatch)
    return seen


def main() -> None:
    """Train, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    args, overrides = parser.parse_known_args()
    run = load_overrides([*FIXED, *CHOSEN, f"train.steps={args.steps}", *overrides], 1)
    device = choose_device(run, 0)
    with process_world(0, 1, device):
        plan = Plan(run)
        engine = build_engine(plan, create_groups(plan.layout, 0), device)
        seen = train(run, engine, args.steps)
        print("| layer | bf16 | `current` | `delayed` | `block` |\n|---|---|---|---|---|")
        for name, layer in seen.items():
            x, weight, grad = layer.matrices
            exact = plain_gemms(x.double(), weight.double(), grad.double())
            ways = [off(plain_gemms(x, weight, grad), exact)]
            for each in Fp8Recipe:
                arithmetic = arithmetic_maker(run.precision.fp8.backend, each, device)(None)
                made = [arithmetic.input(x), arithmetic.weight(weight), arithmetic.grad(grad)]
                if each is Fp8Recipe.delayed:
                    made = [layer.made[which] for which in (INPUT, WEIGHT, GRAD)]
                ways.append(off(gemms(arithmetic, *made), exact))
            print(f"| {name} | {' | '.join(ways)} |", flush=True)
        engine.release()


if __name__ == "__main__":
    main()
