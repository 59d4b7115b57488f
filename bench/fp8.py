"""Products of one linear layer, or of one layer of experts, on one GPU: bf16 beside each recipe in
FP8.

    python bench/fp8.py [--shapes ROWSxINxOUT … EXPERTSxROWSxINxOUT …] [--json FILE]
    python bench/fp8.py --errors [--shapes …] [--device cpu]

One row per shape and way: µs of forward, of forward with both gradients (the weight's added to an
fp32 sum), both replayed as CUDA graphs; of quantising what comes in, which forward does, and the
weight, which happens once per step; how far output, input gradient and weight gradient are off
fp64, as norms of the difference over norms of the exact ones. Way `reference` rounds as `current`
does and multiplies in fp32; with experts `rows` scales each row, and `reference` multiplies those
in fp32. Experts have equally many rows in all.
With --errors no times, on any device: a row per shape, way and kind of matrices, as lines of a
table. Kinds: `even`, normal entries; `uneven`, where columns of what comes in and of the output's
gradient are wider or narrower than others by powers of two, and a few 64 times as wide, as outlying
features of trained models are.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from timing import gpu_time
from torch import Tensor, nn

from app.choices import Dtype, Fp8Recipe, LinearBackendKind
from app.engine.fp8 import Maker, arithmetic_maker, experts_arithmetic
from app.fp8.delayed import DelayedScales
from app.fp8.experts import Fp8GroupedLinear
from app.fp8.linear import Fp8Linear
from app.fp8.reference import LARGEST
from app.model.layers.linear import ColumnParallelLinear, GroupedLinear
from app.model.layers.weight_grads import MainGradSink, WeightGrad
from app.plan.model.weight import Weight

SHAPES = (
    "8192x1024x3072",
    "8192x1024x5632",
    "4096x2048x5120",
    "4096x4096x2048",
    "8192x4096x6144",
    "8192x4096x28672",
    "8192x14336x4096",
    "32x32768x2048x1536",
    "32x32768x768x2048",
    "128x32768x2048x1536",
    "64x32768x1024x1408",
)
WAYS = ("bf16", *(recipe.value for recipe in Fp8Recipe), "reference")
OF_EXPERTS = ("bf16", "rows", "reference")
# of a layer of llama3_8b: queries, keys and values; what attention gives; the feed-forward
ERROR_SHAPES = ("512x4096x6144", "512x4096x4096", "512x4096x28672", "512x14336x4096")
KINDS = ("even", "uneven")
LOOKED_AT = 1024  # rows of the exact products: fp64 of all would take minutes


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement."""

    shape: str  # rows × input width → output width
    way: str
    forward_us: float
    both_us: float  # forward and both gradients
    both_spread_us: float
    operand_us: float  # of that, quantising what comes in
    quantise_us: float  # of the weight, once per step
    both_tflops: float
    output_off: float
    input_grad_off: float
    weight_grad_off: float

    def line(self) -> str:
        """For a terminal."""
        off = f"{self.output_off:9.1e} {self.input_grad_off:9.1e} {self.weight_grad_off:9.1e}"
        times = f"{self.forward_us:9.1f} {self.both_us:9.1f} ±{self.both_spread_us:6.1f}"
        quantised = f"{self.operand_us:7.1f} {self.quantise_us:9.1f}"
        return f"{self.shape:29} {self.way:10} {times} {quantised} {self.both_tflops:7.0f} {off}"


class OneLayer:
    """A linear layer with what comes in, its output's gradient, and the sum of the weight's."""

    def __init__(
        self,
        rows: int,
        given: int,
        made: int,
        way: str,
        device: torch.device,
        kind: str = "even",
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            wide = torch.randn(shape, generator=generator, device=device)
            return (wide * std).to(torch.bfloat16)

        def tokens(columns: int, std: float = 1.0) -> Tensor:
            if kind == "even":
                return normal(1, rows, columns, std=std)
            spread = 2 ** torch.randn(columns, generator=generator, device=device)
            spread[
                torch.randperm(columns, generator=generator, device=device)[: columns // 512]
            ] = 64
            return normal(1, rows, columns, std=std) * spread.bfloat16()

        self.module = ColumnParallelLinear(Weight((made, given)))
        self.module.weight = nn.Parameter(normal(made, given, std=0.02))
        self.x = tokens(given).requires_grad_()
        self.grad = tokens(made, std=1e-4)
        self.total = torch.zeros(made, given, device=device)
        self.fp8: Fp8Linear | None = None
        if way != "bf16":
            self._narrow(way, device)

    def _narrow(self, way: str, device: torch.device) -> None:
        reference = way == "reference"
        recipe = Fp8Recipe.current if reference else Fp8Recipe(way)
        asked = LinearBackendKind.torch if reference else LinearBackendKind.auto
        make: Maker = arithmetic_maker(asked, recipe, device)
        scales = None
        if recipe is Fp8Recipe.delayed:
            scales = DelayedScales(
                ["one"], LARGEST, margin=0, history=16, group=None, device=device
            )
        weight = self.module.weight
        self.fp8 = Fp8Linear(make(scales.of["one"] if scales else None), weight)
        self.module.backend = self.fp8
        if scales is not None:  # one step, so that there are scales
            scales.begin_step()
            self.fp8.stale = True
            self.both()
            scales.finish_step(torch.zeros((), device=device))
            scales.stepped()
            self.fp8.stale = True
            self.total.zero_()

    def forward(self) -> Tensor:
        """The output."""
        return self.module.forward(self.x, MainGradSink(self._add))

    def both(self) -> tuple[Tensor, Tensor]:
        """The output and the input's gradient; the weight's goes to the sum."""
        out = self.forward()
        return out, torch.autograd.grad(out, self.x, self.grad)[0]

    def operand(self) -> object:
        """What comes in, as forward quantises it."""
        return self.fp8 and self.fp8.quantised_input(self.x)

    def off(self) -> tuple[float, float, float]:
        """Of output, input gradient and weight gradient."""
        self.total.zero_()
        out, grad_in = (each.detach()[0] for each in self.both())
        x, grad, weight = self.x.detach()[0], self.grad[0], self.module.weight.detach()
        some = slice(min(LOOKED_AT, len(x)))
        columns = slice(min(LOOKED_AT, len(weight)))
        exact = (
            x[some].double() @ weight.double().T,
            grad[some].double() @ weight.double(),
            grad[:, columns].double().T @ x.double(),
        )
        found = out[some], grad_in[some], self.total[columns]
        output, of_input, of_weight = (
            ((mine.double() - wanted).norm() / wanted.norm()).item()
            for mine, wanted in zip(found, exact, strict=True)
        )
        return output, of_input, of_weight

    def _add(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        gradient.add_to(self.total)


class OneLayerOfExperts:
    """The same of experts, each of which has equally many rows."""

    def __init__(
        self, experts: int, rows: int, given: int, made: int, way: str, device: torch.device
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            wide = torch.randn(shape, generator=generator, device=device)
            return (wide * std).to(torch.bfloat16)

        self.each = rows // experts
        steps = torch.arange(1, experts + 1, device=device)
        self.ends = (steps * self.each).to(torch.int32)
        self.module = GroupedLinear(Weight((experts, given, made)))
        self.module.weight = nn.Parameter(normal(experts, given, made, std=0.02))
        self.x = normal(rows, given).requires_grad_()
        self.grad = normal(rows, made, std=1e-4)
        self.total = torch.zeros(experts, given, made, device=device)
        self.fp8: Fp8GroupedLinear | None = None
        if way != "bf16":
            asked = LinearBackendKind.torch if way == "reference" else LinearBackendKind.auto
            arithmetic = experts_arithmetic(asked, Dtype.bfloat16, device)
            self.fp8 = Fp8GroupedLinear(arithmetic, self.module.weight)
            self.module.backend = self.fp8

    def forward(self) -> Tensor:
        """The output."""
        sink = MainGradSink(lambda param, gradient: gradient.add_to(self.total))
        return self.module.forward(self.x, self.ends, sink)

    def both(self) -> tuple[Tensor, Tensor]:
        """The output and the input's gradient; the weight's goes to the sum."""
        out = self.forward()
        return out, torch.autograd.grad(out, self.x, self.grad)[0]

    def operand(self) -> object:
        """What comes in, as forward quantises it."""
        return self.fp8 and self.fp8.arithmetic.rows(self.x, self.ends)

    def off(self) -> tuple[float, float, float]:
        """Of the first expert's."""
        self.total.zero_()
        out, grad_in = (each.detach()[: self.each] for each in self.both())
        x, grad = (each.detach()[: self.each].double() for each in (self.x, self.grad))
        weight = self.module.weight.detach()[0].double()
        pairs = ((out, x @ weight), (grad_in, grad @ weight.T), (self.total[0], x.T @ grad))
        output, of_input, of_weight = (
            ((mine.double() - wanted).norm() / wanted.norm()).item() for mine, wanted in pairs
        )
        return output, of_input, of_weight


def quantise(layer: OneLayer | OneLayerOfExperts) -> None:
    """The weight, as once per step."""
    if layer.fp8 is not None:
        layer.fp8.stale = True
        layer.fp8.refresh()


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """The work as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    return graph.replay


def measured(shape: str, way: str) -> Row:
    """One row of the table."""
    *experts, rows, given, made = map(int, shape.split("x"))
    device = torch.device("cuda")
    layer: OneLayer | OneLayerOfExperts
    if experts:
        layer = OneLayerOfExperts(experts[0], rows, given, made, way, device)
    else:
        layer = OneLayer(rows, given, made, way, device)
    quantise(layer)
    off = layer.off()
    of_input = of_weight = 0.0
    if layer.fp8 is not None:
        of_input = 1000 * gpu_time(captured(layer.operand))[0]
        of_weight = 1000 * gpu_time(captured(partial(quantise, layer)))[0]
    forward = 1000 * gpu_time(captured(layer.forward))[0]
    both, spread = (1000 * ms for ms in gpu_time(captured(layer.both)))
    tflops = 6 * rows * given * made / both / 1e6
    of_experts = f"{experts[0]} of " if experts else ""
    name = f"{of_experts}{rows} × {given} → {made}"
    return Row(name, way, forward, both, spread, of_input, of_weight, tflops, *off)


def print_errors(shapes: Sequence[str], ways: Sequence[str], device: torch.device) -> None:
    """How far off fp64 products are, in percent."""
    print("| layer | matrices | way | output | input gradient | weight gradient |")
    print("|---|---|---|---|---|---|")
    for shape, kind, way in itertools.product(shapes, KINDS, ways):
        rows, given, made = map(int, shape.split("x"))
        off = OneLayer(rows, given, made, way, device, kind).off()
        told = " | ".join(f"{100 * each:.2f} %" for each in off)
        print(f"| {given} → {made} | {kind} | {way} | {told} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", help="rows x input x output width")
    ways = (*WAYS, *(way for way in OF_EXPERTS if way not in WAYS))
    parser.add_argument("--ways", nargs="+", default=ways, choices=ways)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--errors", action="store_true", help="only how far off fp64")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    args = parser.parse_args()
    if args.errors:
        ways = [way for way in args.ways if way in WAYS]
        print_errors(args.shapes or ERROR_SHAPES, ways, args.device)
        return
    print(
        f"{'layer':29} {'way':10} {'forward':>9} {'both µs':>17} {'input':>7} {'weight':>9} "
        f"{'TFLOP/s':>7} "
        f"{'out off':>9} {'dx off':>9} {'dw off':>9}"
    )
    found = []
    for shape in args.shapes or SHAPES:
        known = WAYS if shape.count("x") == 2 else OF_EXPERTS
        for way in (way for way in args.ways if way in known):
            found.append(measured(shape, way))
            print(found[-1].line(), flush=True)
            torch.cuda.empty_cache()
    if args.json:
        where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        if any(row.way in {recipe.value for recipe in Fp8Recipe} for row in found):
            where["transformer_engine"] = metadata.version("transformer_engine")
        rows = [asdict(row) for row in found]
        args.json.write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
