"""The routed part of a mixture-of-experts layer on several GPUs: dispatch, experts and combine,
forward and backward, with gradients of weights added to fp32 sums.

    torchrun --nproc-per-node 4 bench/routed_layer.py [--tokens 4096 --experts 128 --top-k 8
        --width 2048 --ffn 768] [--even] [--json FILE]

One row per way to carry tokens: median µs of the slowest rank, replayed from a CUDA graph; `+-` is
half the spread of the repeats. Tokens choose at random; with `--even` one expert after the other,
as with forced balance, so that a token's experts lie on fewer ranks. An all-to-all leaves out that
the host has to wait for its splits.

Shapes: T tokens of a rank, K experts per token, E experts, D width.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dispatch import Row, show, timed
from ranks import a_gpu_each, save
from torch import Tensor, nn

from app.choices import DispatcherKind
from app.config.model import MoEConfig
from app.model.layers.weight_grads import MainGradSink, WeightGrad
from app.moe.dispatch.all_to_all import AllToAllDispatcher
from app.moe.dispatch.peer import PeerTransport
from app.moe.dispatch.static import StaticDispatcher
from app.moe.dispatch.transport import CollectiveTransport
from app.moe.experts import Experts
from app.moe.protocol import Dispatcher
from app.plan.model.experts import ExpertWeights
from app.plan.parts.static import PlannedStatic

SIZES = {"tokens": 4096, "experts": 128, "top-k": 8, "width": 2048, "ffn": 768}
Prepare = Callable[[], Any]  # what a dispatcher makes of the choices


def main() -> None:
    """Measure; rank 0 prints and saves."""
    args = parsed()
    with a_gpu_each() as (group, device):
        rows = []
        for name, call in layers(args, group, device):
            rows.append(Row("layer", name, *timed(call, group), rate=None))
            if group.rank() == 0:
                show(rows[-1])
        save(rows, args.json, group)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--even", action="store_true", help="all experts have equally many tokens")
    parser.add_argument("--json", type=Path, help="write the rows there")
    return parser.parse_args()


def layers(
    args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """By each way to carry tokens, forward and backward of the same experts."""
    own = args.experts // group.size()
    weights = ExpertWeights.of(args.width, args.ffn, own)
    experts = Experts(weights).to(device, torch.bfloat16)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.02)
    experts_TK = choices(args, device)
    x_TD, grad_TD = torch.randn(2, args.tokens, args.width, device=device).bfloat16()
    probs_TK = torch.rand(args.tokens, args.top_k, device=device)
    for name, dispatcher, prepare in ways(args, group, experts_TK):
        yield (
            name,
            partial(
                forward_backward,
                experts,
                dispatcher,
                prepare,
                x_TD=x_TD.requires_grad_(),
                probs_TK=probs_TK.requires_grad_(),
                grad_TD=grad_TD,
                sink=fp32_sums(experts),
            ),
        )


def choices(args: argparse.Namespace, device: torch.device) -> Tensor:
    """Experts of each token, T × K."""
    if args.even:
        places = torch.arange(args.tokens * args.top_k, device=device)
        return (places % args.experts).view(args.tokens, args.top_k).sort(dim=1).values
    scores_TE = torch.rand(args.tokens, args.experts, device=device)
    return scores_TE.topk(args.top_k, dim=1).indices.sort(dim=1).values


def ways(
    args: argparse.Namespace, group: dist.ProcessGroup, experts_TK: Tensor
) -> Iterator[tuple[str, Dispatcher[Any, Any], Prepare]]:
    """Dispatchers by name, and what each prepares; on a CPU, which has no peers, without these."""
    device = experts_TK.device
    moe = MoEConfig(num_experts=args.experts, top_k=args.top_k, dispatcher=DispatcherKind.static)
    planned = PlannedStatic(moe, ep=group.size(), etp=1)
    collective = CollectiveTransport(group, planned.experts, 1)
    size = {"tokens": args.tokens, "width": args.width, "top_k": args.top_k}
    carriers: dict[str, PeerTransport | None] = {"collective": None}
    if device.type == "cuda":
        peer = PeerTransport(group, planned.experts, 1, **size, dtype=torch.bfloat16, device=device)
        carriers = {"peer": peer, **carriers}
    for name, carrier in carriers.items():
        static = StaticDispatcher(planned, collective, carrier, ep_rank=group.rank(), device=device)
        yield name, static, partial(static.preprocess, experts_TK)
    all_to_all = AllToAllDispatcher(args.experts, group, 1)
    _, exchange = all_to_all.dispatch(
        torch.zeros(args.tokens, args.width, dtype=torch.bfloat16, device=device),
        all_to_all.preprocess(experts_TK),
    )

    def laid_out() -> object:
        all_to_all.preprocess(experts_TK)
        return exchange  # whose splits are known from here on

    yield "all-to-all", all_to_all, laid_out


def fp32_sums(experts: Experts) -> MainGradSink:
    """Where gradients of the experts' weights are added up."""
    sums = {
        weight: torch.zeros_like(weight, dtype=torch.float32) for weight in experts.parameters()
    }

    def add(weight: nn.Parameter, gradient: WeightGrad) -> None:
        gradient.add_to(sums[weight])

    return MainGradSink(add)


def forward_backward(
    experts: Experts,
    dispatcher: Dispatcher[Any, Any],
    prepare: Prepare,
    *,
    x_TD: Tensor,
    probs_TK: Tensor,
    grad_TD: Tensor,
    sink: MainGradSink,
) -> tuple[Tensor, ...]:
    """The layer's output, and the gradients of tokens and of probabilities."""
    rows, origin = dispatcher.dispatch(x_TD, prepare())
    out_RD = experts(rows.rows_RD, rows.ends_E, sink)
    y_TD = dispatcher.combine(out_RD, probs_TK, origin)
    return y_TD.detach(), *torch.autograd.grad(y_TD, (x_TD, probs_TK), grad_TD)


if __name__ == "__main__":
    main()
