"""The feed-forward part of a mixture-of-experts layer as phases.

`norm · shared · route · preprocess · dispatch · experts · combine · finish`: routing and the exchange of tokens
are separate phases, and what preprocessing learned travels in the dispatcher's frozen record.

Shapes: B sequences, S tokens per sequence, T = B·S tokens, D hidden, F feed-forward hidden, E experts, K experts per
token, R rows (a token once per expert it goes to).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.config import ModelConfig, MoEConfig
from app.model.block import Phase, PhaseName
from app.model.deferred import WeightQueue
from app.model.layers import Context, Mlp, RMSNorm
from app.moe.experts import grouped_swiglu
from app.moe.router import aux_loss, aux_routing, choose, z_loss


class Dispatcher(Protocol):
    """Transport of tokens to the experts of this rank and back."""

    host_sync: bool  # whether `preprocess` waits for the device

    def preprocess(self, experts_TK: Tensor) -> Any:
        """What `dispatch` and `combine` need to know, as a frozen record with at least `ends_E`."""
        ...

    def dispatch(self, x_TD: Tensor, record: Any) -> Tensor:
        """Tokens -> rows R × D of this rank's experts, expert-major, `record.ends_E` their end offsets."""
        ...

    def combine(self, rows_RD: Tensor, probs_TK: Tensor, record: Any) -> Tensor:
        """Expert outputs -> the probability-weighted sum per token, T × D."""
        ...


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """What one router says about one microbatch."""

    loss: Tensor  # scalar with gradient: auxiliary losses with their weights
    aux_loss: Tensor  # scalar, weighted, detached
    z_loss: Tensor  # scalar, weighted, detached
    counts_E: Tensor  # int64: tokens of this rank per expert of the whole layer


class Router(nn.Module):
    """Scores tokens in fp32 and chooses `top_k` experts each, with the losses that keep experts in use."""

    bias_E: Tensor

    def __init__(self, hidden: int, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden))
        self.register_buffer("bias_E", torch.zeros(moe.num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, RoutingReport]:
        """T × D -> fp32 probabilities T × K, experts T × K (ascending per token), report."""
        moe = self.moe
        logits_TE = F.linear(x_TD.float(), self.weight.float())
        bias_E = self.bias_E if moe.bias_update_rate else None
        probs_TK, experts_TK = choose(
            logits_TE, moe.top_k, moe.score, moe.pre_softmax, bias_E, moe.groups, moe.topk_groups, moe.routed_scale
        )
        return probs_TK, experts_TK, self._report(logits_TE, experts_TK)

    def _report(self, logits_TE: Tensor, experts_TK: Tensor) -> RoutingReport:
        moe, num_tokens = self.moe, logits_TE.shape[0]
        aux = z = logits_TE.new_zeros(())
        if moe.aux_loss_coeff:
            scores_TE, map_TE = aux_routing(logits_TE, moe.top_k, moe.score)
            aux = aux_loss(scores_TE, map_TE.sum(0), moe.top_k, moe.aux_loss_coeff, num_tokens)
        if moe.z_loss_coeff:
            z = z_loss(logits_TE, moe.z_loss_coeff)
        chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, experts_TK, True)
        return RoutingReport(aux + z, aux.detach(), z.detach(), chosen_TE.sum(0))


class Experts(nn.Module):
    """This rank's experts, stacked: weights `[expert, in, out]`, gate and up side by side in `w_up`."""

    def __init__(self, hidden: int, ffn: int, first: int, count: int) -> None:
        super().__init__()
        self.first = first  # global index of the first one
        self.w_up = nn.Parameter(torch.empty(count, hidden, 2 * ffn))
        self.w_down = nn.Parameter(torch.empty(count, ffn, hidden))

    def forward(self, rows_RD: Tensor, ends_E: Tensor, later: WeightQueue | None = None) -> Tensor:
        """Rows grouped by expert -> R × D."""
        return grouped_swiglu(rows_RD, self.w_up, self.w_down, ends_E, later)


class MoEBody(nn.Module):
    """Norm, router, experts and optional shared expert of one layer.

    `ep_rank` of `ep` ranks holds experts [ep_rank·E/ep, (ep_rank+1)·E/ep).
    """

    def __init__(self, model: ModelConfig, moe: MoEConfig, dispatcher: Dispatcher, ep_rank: int, ep: int) -> None:
        super().__init__()
        count = moe.num_experts // ep
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.router = Router(model.hidden_size, moe)
        self.experts = Experts(model.hidden_size, moe.ffn_hidden_size, ep_rank * count, count)
        self.shared = Mlp(model.hidden_size, moe.shared_ffn_hidden_size) if moe.shared_ffn_hidden_size else None
        self.shared_gate = nn.Parameter(torch.empty(1, model.hidden_size)) if moe.shared_gate else None
        self.dispatcher = dispatcher
        self.phases = self._phase_list()

    def _phase_list(self) -> tuple[Phase, ...]:
        name, dispatcher = PhaseName, self.dispatcher
        shared = (Phase(name.shared, self._shared, ("h", "context"), ("shared",)),) if self.shared is not None else ()
        finish_inputs = ("x", "y", "shared") if shared else ("x", "y")
        return (
            Phase(name.norm, lambda x: (self.norm(x),), ("x",), ("h",)),
            *shared,
            Phase(name.route, lambda h: self.router(h.flatten(0, -2)), ("h",), ("probs", "chosen", "routing")),
            Phase(name.preprocess, self._preprocess, ("chosen",), ("record",), dispatcher.host_sync),
            Phase(name.dispatch, lambda h, r: (dispatcher.dispatch(h.flatten(0, -2), r),), ("h", "record"), ("rows",)),
            Phase(name.experts, self._experts, ("rows", "record", "context"), ("rows",)),
            Phase(name.combine, lambda rows, p, r: (dispatcher.combine(rows, p, r),), ("rows", "probs", "record"), ("y",)),
            Phase(name.finish, self._finish, finish_inputs, ("x",)),
        )

    @torch.no_grad()
    def _preprocess(self, experts_TK: Tensor) -> tuple[Any]:
        return (self.dispatcher.preprocess(experts_TK),)

    def _experts(self, rows_RD: Tensor, record: Any, context: Context) -> tuple[Tensor]:
        return (self.experts(rows_RD, record.ends_E, context.later),)

    def _shared(self, h: Tensor, context: Context) -> tuple[Tensor]:
        assert self.shared is not None
        out = self.shared(h, context.later)
        return (out if self.shared_gate is None else F.linear(h, self.shared_gate).sigmoid() * out,)

    def _finish(self, x_BSD: Tensor, y_TD: Tensor, shared_BSD: Tensor | None = None) -> tuple[Tensor]:
        out = x_BSD + y_TD.view_as(x_BSD)
        return (out if shared_BSD is None else out + shared_BSD,)
