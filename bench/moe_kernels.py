"""Pieces of the loss and of the mixture of experts on one GPU: our kernels, plain torch,
torch.compile, Transformer Engine.

    python bench/moe_kernels.py [--json FILE]

One row per piece and alternative: median µs of the forward and of forward and backward together,
replayed from a CUDA graph where it can be captured (`eager` where it cannot), and the bytes that
must move at least, or the floating-point operations, over that time. `+-` is half the spread of the
repeats. Backward of the loss turns the same logits into their gradient in place.

Shapes: C tokens and V rows of the vocabulary; T tokens, K experts per token, E experts, R rows, D
width, N width after a product.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from timing import gpu_time
from torch import Tensor

import app.model.layers.loss as loss
import app.moe.permute as permute
import app.moe.router as router
from app.model.layers.weight_grads import GroupedLinearGrad, LinearGrad

try:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
    from transformer_engine.pytorch.router import fused_topk_with_score_function
except (ImportError, OSError, RuntimeError):  # not there, or not fit for this torch
    te = None

LOGITS = ((8192, 50304), (4096, 151936))  # C, V
ROWS = ((8192, 6, 64, 1024), (4096, 8, 128, 2048))  # T, K, E, D
# R, E, D, N
PRODUCTS = (
    (49152, 64, 1024, 1024),
    (49152, 64, 512, 1024),
    (32768, 128, 2048, 1536),
    (32768, 128, 768, 2048),
)
CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"  # Transformer Engine reads it from the environment
BYTES = 2  # of a bf16 value

Call = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """What a piece must move or compute at least: bytes (unit GB/s) or floating-point operations
    (unit TFLOP/s).
    """

    unit: str
    forward: float
    both: float = 0.0

    def rate(self, amount: float, micros: float) -> float:
        """Of so much in so many µs."""
        return round(amount / micros / (1e3 if self.unit == "GB/s" else 1e6), 1)


@dataclass(frozen=True)
class Row:
    """One line of the table; µs."""

    piece: str
    alternative: str
    forward_us: float
    forward_spread_us: float
    both_us: float | None
    both_spread_us: float | None
    forward_rate: float
    both_rate: float | None
    unit: str
    replayed: bool


class Table:
    """Measures, prints and keeps rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(
        self, piece: str, alternative: str, work: Work, forward: Call, both: Call | None = None
    ) -> None:
        """Time an alternative; one that fails prints why and is left out."""
        try:
            once, spread, replayed = micros(forward)
            twice = micros(both) if both is not None else None
        except Exception as error:  # of other people's code: the others still count
            print(
                f"{piece:52} {alternative:26} failed: {type(error).__name__}: {str(error)[:120]!r}",
                flush=True,
            )
            return
        both_us, both_spread, both_replayed = twice or (None, None, True)
        rates = (
            work.rate(work.forward, once),
            work.rate(work.both, both_us) if both_us is not None else None,
        )
        row = Row(
            piece,
            alternative,
            once,
            spread,
            both_us,
            both_spread,
            *rates,
            work.unit,
            replayed and both_replayed,
        )
        self.rows.append(row)
        self.show(row)

    def show(self, row: Row) -> None:
        """Print a line."""
        line = (
            f"{row.piece:52} {row.alternative:26} {row.forward_us:9.1f} "
            f"+-{row.forward_spread_us:6.1f} {row.forward_rate:8.1f}"
        )
        if row.both_us is not None:
            line += f"   {row.both_us:9.1f} +-{row.both_spread_us:6.1f} {row.both_rate:8.1f}"
        print(f"{line} {row.unit}{'' if row.replayed else '  eager'}", flush=True)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument(
        "--cutlass",
        action="store_true",
        help=f"only Transformer Engine's grouped GEMMs, with {CUTLASS}=1",
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    table = Table()
    if args.cutlass:
        grouped_linears(table, "CUTLASS")
    else:
        everything(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in table.rows], indent=1) + "\n")


def everything(table: Table) -> None:
    """All pieces, in this process and, where the environment decides, in one of its own."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if te is None:
        print("transformer_engine: not installed")
    for tokens, vocabulary in LOGITS:
        cross_entropy(table, tokens, vocabulary)
    for sizes in ROWS:
        rows(table, *sizes)
        sorting(table, *sizes[:3])
        choosing(table, *sizes[:3])
    for sizes in PRODUCTS:
        gemms(table, *sizes)
        weight_gradients(table, *sizes)
    if te is not None:
        grouped_linears(table, "default")
        with_cutlass(table)


@contextmanager
def plain() -> Iterator[None]:
    """Without our kernels."""
    with ExitStack() as stack:
        for module in (loss, permute, router):
            stack.enter_context(patch.object(module, "usable", lambda *_: False))
        yield


def without_kernels(run: Call) -> Call:
    """The same call, always on the plain path."""

    def call() -> object:
        with plain():
            return run()

    return call


def compiled(run: Call) -> Call:
    """The plain path through torch.compile, with graph breaks at autograd functions that it does
    not take.
    """
    torch._dynamo.reset()
    fused = torch.compile(run, dynamic=False)
    return without_kernels(fused)


def alternatives(run: Call) -> dict[str, Call]:
    """The ways that a function of ours can run."""
    return {"ours": run, "torch": without_kernels(run), "torch.compile": compiled(run)}


def gradients(run: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad: Tensor) -> Call:
    """Forward and backward."""
    return lambda: torch.autograd.grad(run(), leaves, grad)


def micros(run: Call) -> tuple[float, float, bool]:
    """Median and half the spread in µs, and whether a graph was replayed."""
    for _ in range(3):
        run()
    replay, replayed = graphed(run)
    median, spread = gpu_time(replay)
    return round(median * 1e3, 1), round(spread * 1e3 / 2, 1), replayed


def graphed(run: Call) -> tuple[Call, bool]:
    """A replay of the call, or the call itself where it waits for the host."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run, False
    return graph.replay, True


def cross_entropy(table: Table, tokens: int, vocabulary: int) -> None:
    """Statistics, forward; and with the gradient, backward, which reads and writes the logits."""
    logits_CV = torch.randn(tokens, vocabulary, device="cuda").bfloat16()
    row_C = torch.randint(0, vocabulary, (tokens,), device="cuda")
    lse_C, weight_C = (
        torch.full((tokens,), 12.0, device="cuda"),
        torch.full((tokens,), 1e-4, device="cuda"),
    )
    size = logits_CV.numel() * BYTES

    def forward() -> Tensor:
        return loss._statistics(logits_CV, row_C)

    def backward() -> None:
        loss.into_gradient(logits_CV, row_C, lse_C, weight_C)

    def both() -> None:
        forward()
        backward()

    shape = f"[{tokens}, {vocabulary}]"
    both_ways = alternatives(both)
    for name, run in alternatives(forward).items():
        table.add(
            f"cross_entropy {shape}", name, Work("GB/s", size, 3 * size), run, both_ways[name]
        )
    for name, run in alternatives(backward).items():
        table.add(f"into_gradient {shape}", name, Work("GB/s", 2 * size), run)
    if te is not None:
        leaf_1CV, labels_1C = logits_CV[None].requires_grad_(), row_C[None]

        def theirs() -> Tensor:
            return parallel_cross_entropy(leaf_1CV, labels_1C, 0.0, False, None, -100, True)

        def with_gradient() -> object:
            return torch.autograd.grad(theirs().sum(), leaf_1CV)

        table.add(
            f"cross_entropy {shape}",
            "te (gradient in forward)",
            Work("GB/s", size, 3 * size),
            theirs,
            with_gradient,
        )


def chosen(tokens: int, top_k: int, experts: int) -> Tensor:
    """A random choice, [T, K]."""
    return torch.rand(tokens, experts, device="cuda").topk(top_k, dim=1).indices.sort(dim=1).values


def rows(table: Table, tokens: int, top_k: int, experts: int, width: int) -> None:
    """There, and back with probabilities."""
    experts_TK = chosen(tokens, top_k, experts)
    record = permute.sort_by_expert(experts_TK, experts)
    x_TD = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    rows_RD = torch.randn(tokens * top_k, width, device="cuda").bfloat16().requires_grad_()
    probs_TK = torch.rand(tokens, top_k, device="cuda").requires_grad_()
    grad_TD, grad_RD = torch.randn_like(x_TD), torch.randn_like(rows_RD)

    def spread() -> Tensor:
        return permute.permute(x_TD, record)

    def combine() -> Tensor:
        return permute.combine(rows_RD, probs_TK, record)

    shape, token, row = (
        f"T={tokens} K={top_k} E={experts} D={width}",
        x_TD.numel() * BYTES,
        rows_RD.numel() * BYTES,
    )
    works = (
        Work("GB/s", token + row, 2 * (token + row)),
        Work("GB/s", token + row, 2 * token + 3 * row),
    )
    pieces = (
        ("permute", spread, (x_TD,), grad_RD),
        ("combine", combine, (rows_RD, probs_TK), grad_TD),
    )
    for (piece, run, leaves, grad), work in zip(pieces, works, strict=True):
        both_ways = alternatives(gradients(run, leaves, grad))
        for name, forward in alternatives(run).items():
            table.add(f"{piece} {shape}", name, work, forward, both_ways[name])
    if te is not None:
        their_rows(
            table,
            shape,
            works,
            tensors=(x_TD, rows_RD, probs_TK, experts_TK, grad_TD, grad_RD),
            experts=experts,
        )


def their_rows(
    table: Table, shape: str, works: tuple[Work, Work], tensors: tuple[Tensor, ...], experts: int
) -> None:
    """Transformer Engine's permutation by mask, which sorts as it permutes."""
    x_TD, rows_RD, probs_TK, experts_TK, grad_TD, grad_RD = tensors
    empty_TE = torch.zeros(len(x_TD), experts, device="cuda")
    map_TE = empty_TE.int().scatter(1, experts_TK, 1)
    probs_TE = empty_TE.scatter(1, experts_TK, probs_TK.detach()).requires_grad_()

    def spread() -> tuple[Tensor, Tensor]:
        return te.moe_permute(x_TD, map_TE, num_out_tokens=len(rows_RD), map_type="mask")

    row_map = spread()[1]

    def combine() -> Tensor:
        return te.moe_unpermute(
            rows_RD, row_map, merging_probs=probs_TE, restore_shape=x_TD.shape, map_type="mask"
        )

    pieces = (
        ("permute", "te (sorts too)", spread, gradients(lambda: spread()[0], (x_TD,), grad_RD)),
        ("combine", "te", combine, gradients(combine, (rows_RD, probs_TE), grad_TD)),
    )
    for (piece, name, forward, both), work in zip(pieces, works, strict=True):
        table.add(f"{piece} {shape}", name, work, forward, both)


def sorting(table: Table, tokens: int, top_k: int, experts: int) -> None:
    """Rows in order of expert: ids in, tokens and rows out."""
    experts_TK = chosen(tokens, top_k, experts)

    def run() -> object:
        found = permute.sort_by_expert(experts_TK, experts)
        return found.token_of_row_R, found.row_of_TK, found.ends_E

    def wide() -> object:
        with patch.object(permute, "_narrow", lambda ids, _: ids):
            return run()

    work = Work("GB/s", 3 * 8 * experts_TK.numel())
    for name, call in (
        ("ours", run),
        ("torch, 64-bit ids", wide),
        ("torch.compile", compiled(run)),
    ):
        table.add(f"sort_by_expert T={tokens} K={top_k} E={experts}", name, work, call)


def choosing(table: Table, tokens: int, top_k: int, experts: int) -> None:
    """Ids of the largest scores."""
    scores_TE = torch.randn(tokens, experts, device="cuda")
    piece, work = (
        f"top_experts T={tokens} K={top_k} E={experts}",
        Work("GB/s", 4 * scores_TE.numel() + 8 * tokens * top_k),
    )
    for name, run in alternatives(lambda: router._top_experts(scores_TE, top_k)).items():
        table.add(piece, name, work, run)
    if te is not None:
        options = {
            "use_pre_softmax": False,
            "num_groups": None,
            "group_topk": None,
            "scaling_factor": None,
        }
        options |= {"score_function": "softmax", "expert_bias": None}
        table.add(
            piece,
            "te (softmax too)",
            work,
            lambda: fused_topk_with_score_function(scores_TE, top_k, **options),
        )


def uneven(total: int, experts: int) -> list[int]:
    """Rows of each expert: from 1/2 to 3/2 of the mean, in steps."""
    shares = [experts + 2 * expert + 1 for expert in range(experts)]
    counts = [total * share // sum(shares) for share in shares]
    return [*counts[:-1], total - sum(counts[:-1])]


def gemms(table: Table, total: int, experts: int, width: int, wide: int) -> None:
    """torch's grouped product with [E, in, out] weights, and one product of the same size for
    comparison.
    """
    x_RD = torch.randn(total, width, device="cuda").bfloat16().requires_grad_()
    weight_EDN = torch.randn(experts, width, wide, device="cuda").bfloat16().requires_grad_()
    weight_DN = weight_EDN.detach()[0].clone().requires_grad_()
    grad_RN = torch.randn(total, wide, device="cuda").bfloat16()
    ends_E = torch.tensor(uneven(total, experts), device="cuda").cumsum(0).int()

    def grouped() -> Tensor:
        return F.grouped_mm(x_RD, weight_EDN, offs=ends_E)

    def dense() -> Tensor:
        return x_RD @ weight_DN

    for name, run, weight in (
        ("torch grouped_mm", grouped, weight_EDN),
        ("one dense product", dense, weight_DN),
    ):
        both = gradients(run, (x_RD, weight), grad_RN)
        table.add(
            gemm_name(total, experts, width, wide=wide),
            name,
            gemm_work(total, width, wide),
            run,
            both,
        )


def weight_gradients(table: Table, total: int, experts: int, width: int, wide: int) -> None:
    """Of one microbatch, added to fp32 sums."""
    rows_RD, grad_RN = (
        torch.randn(total, columns, device="cuda").bfloat16() for columns in (width, wide)
    )
    ends_E = torch.tensor(uneven(total, experts), device="cuda").cumsum(0).int()
    sums_EDN, sums_DN = (
        torch.zeros(experts, width, wide, device="cuda"),
        torch.zeros(width, wide, device="cuda"),
    )
    grouped, dense = GroupedLinearGrad(rows_RD, grad_RN, ends_E), LinearGrad(rows_RD.T, grad_RN)
    ways = {
        "ours": lambda: grouped.add_to(sums_EDN),
        "torch grouped_mm, add_": lambda: sums_EDN.add_(grouped()),
        "one dense product": lambda: dense.add_to(sums_DN),
    }
    for name, run in ways.items():
        table.add(
            f"weight gradients R={total} E={experts} {width}->{wide}",
            name,
            gemm_work(total, width, wide),
            run,
        )


def gemm_name(total: int, experts: int, width: int, wide: int) -> str:
    """As it stands in the table."""
    return f"grouped product R={total} E={experts} {width}->{wide}"


def gemm_work(total: int, width: int, wide: int) -> Work:
    """A product forward, two backward."""
    flops = 2.0 * total * width * wide
    return Work("TFLOP/s", flops, 3 * flops)


def grouped_linears(table: Table, mode: str) -> None:
    """Transformer Engine's, in the mode that the environment of this process asks for."""
    for total, experts, width, wide in PRODUCTS:
        layer = te.GroupedLinear(
            experts, width, wide, bias=False, params_dtype=torch.bfloat16, device="cuda"
        )
        x_RD = torch.randn(total, width, device="cuda").bfloat16().requires_grad_()
        grad_RN, counts = torch.randn(total, wide, device="cuda").bfloat16(), uneven(total, experts)
        run, work = partial(layer, x_RD, counts), gemm_work(total, width, wide)
        both = gradients(run, (x_RD, *layer.parameters()), grad_RN)
        table.add(
            gemm_name(total, experts, width, wide=wide),
            f"te GroupedLinear {mode}",
            work,
            run,
            both,
        )


def with_cutlass(table: Table) -> None:
    """The same in a process whose environment says so."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--cutlass", "--json", str(found)]
        if subprocess.run(command, env={**os.environ, CUTLASS: "1"}).returncode:
            print(f"{CUTLASS}=1: failed")
            return
        table.rows += [Row(**row) for row in json.loads(found.read_text())]


if __name__ == "__main__":
    main()
