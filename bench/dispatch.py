"""Tokens to experts on several GPUs and back: both transports of static shapes, and NCCL's
all-to-all with permutations.

    torchrun --nproc-per-node 2 bench/dispatch.py [--tokens 4096 --experts 128 --top-k 8
        --width 2048 --etp 1] [--json FILE]

One row per piece and transport: median µs of the slowest rank, replayed from a CUDA graph, and the
bytes that the tokens of other ranks have at least, each once for each rank with any of its experts,
over that time, in GB/s. `+-` is half the spread of the repeats. Preparing an all-to-all leaves out
that the host has to wait for its splits, without which nothing behind it can be captured.

Pieces, forward: `offsets` choices of all ranks and their rows · `dispatch` tokens to rows ·
`combine` rows times probabilities, summed. Backward: `combine'` gradients of rows and probabilities
· `dispatch'` of tokens.

Shapes: T tokens of a rank, K experts per token, E experts, R rows, D width.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import a_gpu_each, save
from torch import Tensor

from app.moe.dispatch.all_to_all import AllToAllDispatcher
from app.moe.dispatch.expert_rows import place_rows
from app.moe.dispatch.peer import PeerTransport
from app.moe.dispatch.transport import CollectiveTransport, TokenTransport

# Calls in one graph: an even number, so that both halves of buffers take turns from one replay to
# the next.
CALLS = 10
REPEATS = 15
PAUSE = 2_000_000  # cycles, about a millisecond, in which all hosts get ahead

Call = Callable[[], object]
Pieces = dict[str, Call]


@dataclass(frozen=True)
class Given:
    """A rank's tokens and their gradients."""

    experts_TK: Tensor
    x_TD: Tensor
    probs_TK: Tensor
    grad_TD: Tensor


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    piece: str
    transport: str
    micros: float
    spread: float
    rate: float | None  # GB/s


def main() -> None:
    """Measure; rank 0 prints and saves."""
    args = parsed()
    with a_gpu_each() as (group, device):
        save(measured(args, group, device), args.json, group)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("tokens", 4096), ("experts", 128), ("top-k", 8), ("width", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--etp", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows there")
    return parser.parse_args()


def measured(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[Row]:
    """All pieces of all transports."""
    local = args.experts * args.etp // group.size()
    scores_TE = torch.rand(args.tokens, args.experts, device=device)
    x_TD, grad_TD = torch.randn(2, args.tokens, args.width, device=device).bfloat16()
    given = Given(
        scores_TE.topk(args.top_k, dim=1).indices.sort(dim=1).values,
        x_TD,
        torch.rand(args.tokens, args.top_k, device=device),
        grad_TD,
    )
    size = {"tokens": args.tokens, "width": args.width, "top_k": args.top_k}
    transports: dict[str, TokenTransport] = {
        "peer": PeerTransport(group, local, args.etp, **size, dtype=x_TD.dtype, device=device),
        "collective": CollectiveTransport(group, local, args.etp),
    }
    ways = {
        name: static_pieces(transport, given, group, local=local, etp=args.etp)
        for name, transport in transports.items()
    }
    ways["all-to-all"] = all_to_all_pieces(given, group, args.experts, etp=args.etp)
    size_on_link = incoming_bytes(given, group, local, etp=args.etp)
    if group.rank() == 0:
        print(f"{torch.cuda.get_device_name()} x {group.size()}, torch {torch.__version__}")
        print(f"{vars(args)}, {size_on_link / 2**20:.1f} MiB from other ranks", flush=True)
    rows = []
    for piece in ways["peer"]:
        for name, pieces in ways.items():
            micros, spread = timed(pieces[piece], group)
            rate = None if piece == "offsets" else round(size_on_link / micros / 1e3, 1)
            rows.append(Row(piece, name, micros, spread, rate))
            if group.rank() == 0:
                show(rows[-1])
    return rows


def show(row: Row) -> None:
    """Print a line."""
    rate = "" if row.rate is None else f"{row.rate:8.1f} GB/s"
    line = f"{row.piece:10} {row.transport:12} {row.micros:8.1f} +-{row.spread:6.1f} us {rate}"
    print(line, flush=True)


def static_pieces(
    transport: TokenTransport, given: Given, group: dist.ProcessGroup, local: int, etp: int
) -> Pieces:
    """Those of a transport, with as many rows as any choice could need."""
    first = group.rank() // etp * local
    num_rows = group.size() * given.experts_TK.numel()
    experts_TK = given.experts_TK

    def offsets() -> Tensor:
        chosen_NK = transport.gather_choices(experts_TK)
        return place_rows(chosen_NK, first, local, num_rows).row_of_NK

    row_of_NK = offsets()
    rows_RD = transport.spread(given.x_TD, row_of_NK, num_rows)
    where = row_of_NK, experts_TK
    return {
        "offsets": offsets,
        "dispatch": lambda: transport.spread(given.x_TD, row_of_NK, num_rows),
        "combine": lambda: transport.combine(rows_RD, given.probs_TK, *where),
        "combine'": lambda: transport.spread_gradients(
            given.grad_TD, rows_RD, given.probs_TK, *where
        ),
        "dispatch'": lambda: transport.combine(rows_RD, None, *where),
    }


def all_to_all_pieces(given: Given, group: dist.ProcessGroup, experts: int, etp: int) -> Pieces:
    """Those of the dispatcher that waits for the splits, once they are known."""
    dispatcher = AllToAllDispatcher(experts, group, etp)
    x_TD = given.x_TD.clone().requires_grad_()
    probs_TK = given.probs_TK.clone().requires_grad_()
    dispatched, exchange = dispatcher.dispatch(x_TD, dispatcher.preprocess(given.experts_TK))
    rows_RD = dispatched.rows_RD
    out_RD = rows_RD.detach().clone().requires_grad_()
    y_TD = dispatcher.combine(out_RD, probs_TK, exchange)

    @torch.no_grad()
    def dispatch() -> object:
        return dispatcher.dispatch(x_TD, exchange)

    @torch.no_grad()
    def combine() -> object:
        return dispatcher.combine(out_RD, probs_TK, exchange)

    def gradients(out: Tensor, leaves: tuple[Tensor, ...], grad: Tensor) -> object:
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return {
        "offsets": lambda: dispatcher.preprocess(given.experts_TK),
        "dispatch": dispatch,
        "combine": combine,
        "combine'": lambda: gradients(y_TD, (out_RD, probs_TK), given.grad_TD),
        "dispatch'": lambda: gradients(rows_RD, (x_TD,), out_RD.detach()),
    }


def incoming_bytes(given: Given, group: dist.ProcessGroup, local: int, etp: int) -> int:
    """Of tokens of other ranks with any expert here, on the rank with the most."""
    everyones = [torch.empty_like(given.experts_TK) for _ in range(group.size())]
    dist.all_gather(everyones, given.experts_TK, group=group)
    mine = group.rank() // etp
    tokens = sum(
        (experts_TK // local == mine).any(dim=1).sum()
        for rank, experts_TK in enumerate(everyones)
        if rank != group.rank()
    )
    most = torch.as_tensor(tokens, device=given.x_TD.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most) * given.x_TD.shape[1] * given.x_TD.itemsize


def timed(call: Call, group: dist.ProcessGroup) -> tuple[float, float]:
    """Median µs of one call and half the distance from the 10th to the 90th percentile, on the
    slowest rank.
    """
    for _ in range(4):  # compiles kernels and makes connections
        call()
    torch.cuda.synchronize()
    dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        for _ in range(CALLS):
            call()
    times = torch.tensor([once(graph, group) for _ in range(REPEATS)], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    micros = times.tolist()
    tenths = statistics.quantiles(micros, n=10)
    return round(statistics.median(micros), 1), round((tenths[-1] - tenths[0]) / 2, 1)


def once(graph: torch.cuda.CUDAGraph, group: dist.ProcessGroup) -> float:
    """µs of one call among those of a graph, without the host's share."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier(group)
    torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE)
    graph.replay()  # so that ranks begin the next one together
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / CALLS


if __name__ == "__main__":
    main()
