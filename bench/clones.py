"""What clones of hot experts cost in a layer, piece by piece, on several GPUs.

    torchrun --nproc-per-node 2 bench/clones.py [--tokens 4096 --experts 128 --top-k 8 --width 2048
        --ffn 768 --spares 2 --hot 4] [--even] [--json FILE]

One row per piece and transport: median µs of the slowest rank, replayed from a CUDA graph; `+-` is
half the spread of the repeats. Routers prefer the first `hot` experts of the first rank. Behind a
piece's name `even`: the same where experts are chosen in turn and nothing is moved; `--even`: these
alone.

Pieces: `counts` of a rank's choices and of all ranks · `plan` by each algorithm, also of 8 ranks
with 256 experts in all · `reroute` · `send` and `home` of both kinds of matrices · `product` of the
rows that go to clones, both matrices, and as many rows by torch's grouped product · `gradient` of
both matrices · `rows`: where those of all ranks' choices lie, without slots and with them · a
`barrier` as others have it, and that of clones, where it is needed and where not · `forward` and
`backward`: all that clones add to a layer.

Shapes: T tokens of a rank, K experts per token, E experts, D width, F hidden width of an expert, S
slots, s of each rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dispatch import Call, timed
from ranks import a_gpu_each, save
from torch import Tensor

from app.choices import CloneAlgorithm
from app.kernels.clones.meeting import meet_if
from app.kernels.grouped_gemm import grouped_gemm
from app.kernels.grouped_gradient import add_grouped_gradient
from app.moe.clones.peer import PeerClones
from app.moe.clones.record import Clones
from app.moe.clones.transport import CloneTransport, CollectiveClones
from app.moe.dispatch.expert_rows import place_rows
from app.moe.echo import ClonePlan, count_choices, follow_plan, plan_slots


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    piece: str
    way: str  # transport, algorithm or kernel
    micros: float
    spread: float


def main() -> None:
    """Measure; rank 0 prints and saves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("tokens", 4096), ("experts", 128), ("top-k", 8), ("width", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("ffn", 768), ("spares", 2), ("hot", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--even", action="store_true", help="only where nothing is moved")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    with a_gpu_each() as (group, device):
        if group.rank() == 0:
            print(f"{torch.cuda.get_device_name()} x {group.size()}, torch {torch.__version__}")
            print(vars(args), flush=True)
        rows = []
        for piece, way, call in (even_pieces if args.even else pieces)(args, group, device):
            rows.append(Row(piece, way, *timed(call, group)))
            if group.rank() == 0:
                row = rows[-1]
                print(f"{piece:14} {way:20} {row.micros:8.1f} +-{row.spread:6.1f} us", flush=True)
        save(rows, args.json, group)


def choices(args: argparse.Namespace, hot: int, device: torch.device) -> Tensor:
    """K ids of each token, ascending; 2.8 more for the scores of the first `hot` experts."""
    scores_TE = torch.randn(args.tokens, args.experts, device=device)
    scores_TE[:, :hot] += 2.8
    return scores_TE.topk(args.top_k, dim=1).indices.sort(dim=1).values


def choices_in_turn(args: argparse.Namespace, rank: int, device: torch.device) -> Tensor:
    """The same with as many for each expert."""
    nth = torch.arange(args.tokens * args.top_k, device=device) + rank * args.tokens * args.top_k
    return (nth % args.experts).view(args.tokens, args.top_k).sort(dim=1).values


def wide_counts(device: torch.device) -> Tensor:
    """Tokens of 8 ranks for 256 experts by Zipf's law, 0.7, in a random order."""
    drawn = torch.Generator().manual_seed(0)
    share_E = (1 + torch.randperm(256, generator=drawn)) ** -0.7
    return (share_E / share_E.sum() * 32768).long().repeat(8, 1).to(device)


def pieces(
    args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, str, Call]]:
    """Name, way and call of each."""
    ranks, rank = group.size(), group.rank()
    local = args.experts // ranks
    shapes = shapes_of(args)
    given = {"shapes": shapes, "device": device}
    transports: dict[str, CloneTransport] = {
        "peer": PeerClones(group, local, args.spares, **given, dtype=torch.bfloat16),
        "collective": CollectiveClones(group, local, args.spares, **given),
    }
    experts_TK = choices(args, args.hot, device)
    counts_CE = count_choices(experts_TK, args.experts)
    yield "counts", "own", partial(count_choices, experts_TK, args.experts)
    for name, transport in transports.items():
        yield "counts", name, partial(transport.gather_counts, counts_CE)
    counts_RE = transports["collective"].gather_counts(counts_CE).clone()
    plan = plan_slots(counts_RE, args.spares, CloneAlgorithm.target_search, threshold=0.0)
    sums_4 = torch.zeros(4, dtype=torch.int64, device=device)
    for algorithm in CloneAlgorithm:
        spares = 1 if algorithm is CloneAlgorithm.approx_bin_packing else args.spares
        for name, counts in (("plan", counts_RE), ("plan 8 x 256", wide_counts(device))):
            call = partial(plan_slots, counts, spares, algorithm, threshold=0.1, sums_4=sums_4)
            yield name, algorithm.value, call
    yield "reroute", "", partial(follow_plan, experts_TK, plan, rank, counts_CE)
    yield from exchanges(transports, plan, shapes, local=local, device=device)
    yield from gemms(plan, shapes, args.spares, device=device)
    yield from even_pieces(args, group, device)


def shapes_of(args: argparse.Namespace) -> list[torch.Size]:
    """Of both kinds of matrices."""
    return [torch.Size((args.width, 2 * args.ffn)), torch.Size((args.ffn, args.width))]


def even_pieces(
    args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, str, Call]]:
    """All that clones add to a layer where nothing is moved, by peers' memory."""
    ranks, rank = group.size(), group.rank()
    local, shapes = args.experts // ranks, shapes_of(args)
    peer = PeerClones(group, local, args.spares, shapes, torch.bfloat16, device)
    experts_TK = choices_in_turn(args, rank, device)
    counts_CE = count_choices(experts_TK, args.experts)
    counts_RE = peer.gather_counts(counts_CE).clone()
    sums_4 = torch.zeros(4, dtype=torch.int64, device=device)
    planned = partial(
        plan_slots,
        spares_per_rank=args.spares,
        algorithm=CloneAlgorithm.target_search,
        threshold=0.05,
        sums_4=sums_4,
    )
    plan = planned(counts_RE)
    clones = Clones(plan.expert_S, plan.moved_S)
    weights = [torch.randn(local, *shape, device=device).bfloat16() for shape in shapes]
    totals = [torch.zeros(local, *shape, device=device) for shape in shapes]
    gemm, gradient = empty_gemms(args, local, weights)

    def forward() -> None:
        counts_CE = count_choices(experts_TK, args.experts)
        plan = planned(peer.gather_counts(counts_CE))
        follow_plan(experts_TK, plan, rank, counts_CE)
        send(Clones(plan.expert_S, plan.moved_S))
        gemm()

    def send(clones: Clones) -> None:
        for kind in (0, 1):
            peer.send(kind, weights, clones)

    def home() -> None:
        for kind in (1, 0):
            peer.grads(kind, clones)
            peer.return_grads(kind, totals[kind], clones)

    def backward() -> None:
        send(clones)
        gemm()
        gradient()
        home()

    yield "counts even", "own", partial(count_choices, experts_TK, args.experts)
    yield "counts even", "peer", partial(peer.gather_counts, counts_CE)
    yield "plan even", "target_search", partial(planned, counts_RE)
    yield "reroute even", "", partial(follow_plan, experts_TK, plan, rank, counts_CE)
    yield "send even", "peer", partial(send, clones)
    yield "product even", "", gemm
    yield "gradient even", "", gradient
    yield "home even", "peer", home
    yield "forward even", "peer", forward
    yield "backward even", "peer", backward
    chosen_NK = torch.cat([choices_in_turn(args, each, device) for each in range(ranks)]).short()
    rows = partial(place_rows, chosen_NK, rank * local, num_rows=chosen_NK.numel())
    yield "rows even", "without", partial(rows, local=local)
    yield "rows even", "with", partial(rows, local=local + args.spares)
    yield "barrier", "torch", peer._memory.barrier
    for name, needed in (("not needed", 0), ("needed", 1)):
        needed_S = torch.full_like(plan.moved_S, needed)
        yield "barrier", f"clones', {name}", partial(meet_if, needed_S, peer._arrivals)


def empty_gemms(
    args: argparse.Namespace, local: int, weights: list[Tensor]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Both products, and gradients of both kinds, of slots without rows behind those of experts."""
    count = args.tokens * args.top_k
    ends_E = torch.arange(1, local + 1, device=weights[0].device) * (count // local)
    ends_E = torch.cat((ends_E, ends_E[-1:].expand(args.spares))).int()
    rows = [weight.new_zeros(count, weight.shape[1]) for weight in weights]
    outs = [weight.new_zeros(count, weight.shape[2]) for weight in weights]
    slots = [weight[: args.spares] for weight in weights]
    sums = [slot.float() for slot in slots]

    def gemm() -> None:
        for out, row, slot in zip(outs, rows, slots, strict=True):
            grouped_gemm(out, row, slot, ends_E=ends_E, first=local)

    def gradient() -> None:
        for total, row, out in zip(sums, rows, outs, strict=True):
            add_grouped_gradient(total, row, out, ends_E=ends_E, first=local, adds=False)

    return gemm, gradient


def exchanges(
    transports: dict[str, CloneTransport],
    plan: ClonePlan,
    shapes: list[torch.Size],
    *,
    local: int,
    device: torch.device,
) -> Iterator[tuple[str, str, Call]]:
    """Matrices out, gradients home, of both kinds as a layer does it."""
    weights = [torch.randn(local, *shape, device=device).bfloat16() for shape in shapes]
    totals = [torch.zeros(local, *shape, device=device) for shape in shapes]
    moved_of = {"": plan.moved_S, " even": plan.moved_S * 0}
    for name, transport in transports.items():
        # where nothing moves, peers have their own pieces
        for suffix in ("",) if name == "peer" else moved_of:
            clones = Clones(plan.expert_S, moved_of[suffix])

            def send(transport: CloneTransport = transport, clones: Clones = clones) -> None:
                for kind in (0, 1):
                    transport.send(kind, weights, clones)

            def home(transport: CloneTransport = transport, clones: Clones = clones) -> None:
                for kind in (1, 0):
                    transport.grads(kind, clones)
                    transport.return_grads(kind, totals[kind], clones)

            yield f"send{suffix}", name, send
            yield f"home{suffix}", name, home


def gemms(
    plan: ClonePlan, shapes: list[torch.Size], spares: int, *, device: torch.device
) -> Iterator[tuple[str, str, Call]]:
    """Of the rows that the rank with most of them gets, and as many by torch."""
    moved_Rs = plan.moved_S.view(-1, spares)
    rows_s = moved_Rs[int(moved_Rs.sum(dim=1).argmax())]
    ends_E = torch.cat((rows_s.new_full((1,), 4096), rows_s)).cumsum(0).int()
    count = int(ends_E[-1])
    slots = [torch.randn(spares, *shape, device=device).bfloat16() for shape in shapes]
    rows = [torch.randn(count, shape[0], device=device).bfloat16() for shape in shapes]
    grads = [torch.randn(count, shape[1], device=device).bfloat16() for shape in shapes]
    outs = [torch.empty_like(grad) for grad in grads]
    sums = [torch.zeros(spares, *shape, device=device) for shape in shapes]
    ends_s = ends_E[1:] - 4096

    def ours() -> None:
        for out, row, slot in zip(outs, rows, slots, strict=True):
            grouped_gemm(out, row, slot, ends_E=ends_E, first=1)

    def torchs() -> None:
        for row, slot in zip(rows, slots, strict=True):
            F.grouped_mm(row[4096:], slot, offs=ends_s)

    def gradient() -> None:
        for total, row, grad in zip(sums, rows, grads, strict=True):
            add_grouped_gradient(total, row, grad, ends_E=ends_E, first=1, adds=False)

    yield f"product {count - 4096}", "ours", ours
    yield f"product {count - 4096}", "torch", torchs
    yield f"gradient {count - 4096}", "ours", gradient


if __name__ == "__main__":
    main()
