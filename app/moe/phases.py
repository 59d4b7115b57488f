"""Feed-forward part of a mixture-of-experts layer as phases.

`norm · shared · route · preprocess · dispatch · experts · combine · finish`: routing and token
dispatch are separate phases, and a dispatcher passes what it computes from phase to phase in frozen
records of its own. `MoEBody` shows the phases as a program.

Shapes: B sequences, s tokens per sequence of this rank, T = B·s tokens, D hidden, F feed-forward
hidden, E experts, K experts per token, R rows (a token once per expert it goes to).
"""

from __future__ import annotations

from typing import Generic

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from app.choices import Balance, Recompute
from app.collectives import all_reduce
from app.config import ModelConfig, MoEConfig
from app.model.block import Body, Phase, RoutingReport, StepState
from app.model.layers.layer_groups import LayerGroups, rank, size
from app.model.layers.layers import Context, build_mlp
from app.model.layers.norms import norm_of_hidden
from app.model.layers.residual import residual_sum
from app.model.layers.weight_grads import WeightGradSink
from app.moe.capacity import within_capacity
from app.moe.experts import Dispatched, build_experts
from app.moe.protocol import Dispatcher, Origin, Prepared
from app.moe.router import aux_loss, aux_routing, choose, in_turn, sequence_aux_loss, z_loss
from app.moe.router_matmul import router_matmul
from app.plan.model.experts import MoEBodyWeights, RouterWeights
from app.plan.parts.dispatch_record import capacity
from app.plan.parts.dispatcher import planned_dispatcher
from app.plan.phases import PhaseName


class Router(StepState, nn.Module):
    """Scores tokens in fp32, chooses `top_k` experts for each, and computes the auxiliary losses.

    The ranks of `layer_groups.tp_cp_control` hold parts of the same sequences. For a balancing loss
    each rank combines counts summed over them with its own scores. Rank losses sum to the
    microbatch loss.
    """

    bias_E: Tensor
    load_E: Tensor
    microbatches: Tensor

    def __init__(self, weights: RouterWeights, moe: MoEConfig, layer_groups: LayerGroups) -> None:
        super().__init__()
        self.moe = moe
        self.layer_groups = layer_groups
        self.weight = nn.Parameter(torch.empty(weights.weight.shape))
        self.register_buffer("bias_E", torch.zeros(moe.num_experts, dtype=torch.float32))
        if moe.balance is Balance.global_batch:
            load_E = torch.zeros(moe.num_experts, dtype=torch.int64)
            self.register_buffer("load_E", load_E, persistent=False)
            microbatches = torch.zeros((), dtype=torch.int64)
            self.register_buffer("microbatches", microbatches, persistent=False)

    def start_step(self) -> None:
        """Reset the load of the previous step; called before the first microbatch of each step.

        The loss of balance=global_batch evens the mean load of the microbatches so far; its value
        therefore depends on how the batch is split into microbatches, and assumes that every
        microbatch's forward runs exactly once.
        """
        if self.moe.balance is Balance.global_batch:
            self.load_E.zero_()
            self.microbatches.zero_()

    def forward(self, x_BsD: Tensor) -> tuple[Tensor, Tensor, RoutingReport]:
        """Map B × s × D to fp32 probabilities T × K, experts T × K (ascending per token) and a
        report.

        A choice beyond an expert's capacity has probability 0 and the expert id E.
        """
        moe = self.moe
        logits_TE = self.logits(self._jittered(x_BsD.flatten(0, -2)))
        probs_TK, experts_TK = choose(
            logits_TE,
            moe.top_k,
            moe.score,
            pre_softmax=moe.pre_softmax,
            bias_E=self.bias_E if moe.bias_update_rate else None,
            groups=moe.groups,
            topk_groups=moe.topk_groups,
            group_best=moe.group_best,
            scale=moe.routed_scale,
            norm_topk_prob=moe.norm_topk_prob,
            forced_TK=self._forced(logits_TE),
        )
        if moe.capacity_factor is not None:
            limit = capacity(experts_TK.numel(), moe.num_experts, moe.capacity_factor)
            kept_TK = within_capacity(
                probs_TK, experts_TK, moe.num_experts, limit=limit, policy=moe.drop_policy
            )
            probs_TK = probs_TK * kept_TK
            experts_TK = experts_TK.masked_fill(~kept_TK, moe.num_experts)
        return probs_TK, experts_TK, self._report(logits_TE, experts_TK, len(x_BsD))

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the score of every expert before softmax or sigmoid: fp32 T × E."""
        return router_matmul(x_TD, self.weight)

    def _jittered(self, x_TD: Tensor) -> Tensor:
        """In training, multiply by noise from the device's generator (Switch, arXiv 2101.03961)."""
        eps = self.moe.jitter_eps
        if not eps or not torch.is_grad_enabled():
            return x_TD
        wide_TD = x_TD.float()
        return wide_TD * torch.empty_like(wide_TD).uniform_(1 - eps, 1 + eps)

    def _forced(self, logits_TE: Tensor) -> Tensor | None:
        """Return experts in round-robin order across ranks; None lets the router choose."""
        if not self.moe.force_balance:
            return None
        top_k = self.moe.top_k
        return in_turn(
            logits_TE,
            top_k,
            first=rank(self.layer_groups.tp_cp_dp_control) * len(logits_TE) * top_k,
        )

    def _report(self, logits_TE: Tensor, experts_TK: Tensor, sequences: int) -> RoutingReport:
        moe = self.moe
        aux = z = logits_TE.new_zeros(())
        if moe.aux_loss_coeff:
            aux = self._aux_loss(logits_TE, sequences)
        if moe.z_loss_coeff:
            num_tokens = len(logits_TE) * size(self.layer_groups.tp_cp_control)
            z = z_loss(logits_TE, moe.z_loss_coeff, num_tokens=num_tokens)
        drops = moe.capacity_factor is not None
        chosen_TE = logits_TE.new_zeros(len(logits_TE), moe.num_experts + drops, dtype=torch.bool)
        counts_E = chosen_TE.scatter_(1, experts_TK, True)[:, : moe.num_experts].sum(0)
        dropped = experts_TK.numel() - counts_E.sum() if drops else counts_E.new_zeros(())
        return RoutingReport(aux + z, aux.detach(), z.detach(), counts_E=counts_E, dropped=dropped)

    def _aux_loss(self, logits_TE: Tensor, sequences: int) -> Tensor:
        moe = self.moe
        layer_groups = self.layer_groups
        scores_TE, map_TE = aux_routing(logits_TE, moe.top_k, moe.score)
        num_tokens = len(logits_TE) * size(layer_groups.tp_cp_control)
        if moe.balance is Balance.sequence:
            scores_BsE: Tensor = scores_TE.unflatten(0, (sequences, -1))
            map_BsE: Tensor = map_TE.unflatten(0, (sequences, -1))
            counts_BE = _summed(map_BsE.sum(1), layer_groups.tp_cp_control)
            return sequence_aux_loss(
                scores_BsE,
                counts_BE,
                moe.top_k,
                coeff=moe.aux_loss_coeff,
                num_tokens=num_tokens // sequences,
            )
        if moe.balance is Balance.microbatch:
            counts_E = _summed(map_TE.sum(0), layer_groups.tp_cp_control)
        else:
            counts_E = self._mean_load(map_TE.sum(0))
        return aux_loss(
            scores_TE, counts_E, moe.top_k, coeff=moe.aux_loss_coeff, num_tokens=num_tokens
        )

    @torch.no_grad()
    def _mean_load(self, counts_E: Tensor) -> Tensor:
        """Return the tokens per expert of the step's mean microbatch so far, over data-parallel
        ranks.
        """
        self.load_E += _summed(counts_E, self.layer_groups.tp_cp_dp_control)
        self.microbatches += size(self.layer_groups.tp_cp_dp_control) // size(
            self.layer_groups.tp_cp_control
        )
        return self.load_E / self.microbatches


class RouterWithBias(Router):
    """Router with a learned bias on its logits."""

    def __init__(self, weights: RouterWeights, moe: MoEConfig, layer_groups: LayerGroups) -> None:
        super().__init__(weights, moe, layer_groups)
        assert weights.bias is not None
        self.bias = nn.Parameter(torch.empty(weights.bias.shape))

    def logits(self, x_TD: Tensor) -> Tensor:
        """See `Router`."""
        return super().logits(x_TD) + self.bias


def _summed(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        all_reduce(counts, group)
    return counts


class MoEBody(Body, Generic[Prepared, Origin]):
    """Norm, router, experts and optional shared expert of one layer. Its phases, as they run:

        x, h = norm(x, context)
        shared = shared(h, context)                          # overlaps the rest, if there is one

        # 1. The router chooses K experts per token, with probabilities; it has learned weights.
        probs, chosen, routing = route(h)
        # 2. Lay out the rows as far as the device knows: sorted by expert, counted.
        prepared = preprocess(chosen)
        # 3. Dispatch tokens to the ranks of their experts, expert-major there.
        dispatched, origin = dispatch(h, prepared)
        # 4. Two grouped GEMMs over the rows of this rank's experts.
        expert_out = experts(dispatched, context)
        # 5. Combine: return rows to the source ranks; sum a token's K, weighted, in a fixed order.
        y = combine(expert_out, probs, origin)

        x = finish(x, y, shared)

    `prepared` and `origin` are private records of the dispatcher, `dispatched` has one type for all
    (`app.moe.protocol`). Only `dispatch` may synchronize with the device. Captured intervals and
    recomputed parts are ranges of this list.

    `layer_groups.ep_rank` of `layer_groups.ep` ranks holds experts [ep_rank·E/ep,
    (ep_rank+1)·E/ep), or a part of each of them.
    """

    def __init__(
        self,
        model: ModelConfig,
        moe: MoEConfig,
        dispatcher: Dispatcher[Prepared, Origin],
        layer_groups: LayerGroups,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        """`side`: stream of the shared expert, for overlap; None runs it on the main stream."""
        super().__init__()
        weights = MoEBodyWeights.of(model, moe)
        self.norm = norm_of_hidden(model)
        router = RouterWithBias if moe.logit_bias else Router
        self.router = router(weights.router, moe, layer_groups)
        self.experts = build_experts(weights.experts, moe, layer_groups)
        self.shared = None if weights.shared is None else build_mlp(weights.shared, layer_groups)
        gate = weights.shared_gate
        self.shared_gate = None if gate is None else nn.Parameter(torch.empty(gate.shape))
        self.dispatcher = dispatcher
        self.moe = moe
        self.side = side
        self.add = residual_sum(model)
        self.planned = planned_dispatcher(moe, layer_groups.ep, layer_groups.etp)
        self.phases = self._phase_list(self.planned.waits_for_host)

    def _phase_list(self, waits: bool) -> tuple[Phase, ...]:
        name = PhaseName
        shared: tuple[Phase, ...] = ()
        summed: tuple[str, ...] = ("x", "y")
        if self.shared is not None:
            shared = (Phase(name.shared, self._shared, ("h", "context"), outputs=("shared",)),)
            summed = ("x", "y", "shared")
        return (
            Phase(name.norm, self._norm, ("x", "context"), outputs=("x", "h")),
            *shared,
            Phase(name.route, self.router, ("h",), outputs=("probs", "chosen", "routing")),
            Phase(name.preprocess, self._preprocess, ("chosen",), outputs=("prepared",)),
            Phase(
                name.dispatch,
                self._dispatch,
                ("h", "prepared"),
                outputs=("dispatched", "origin"),
                host_sync=waits,
            ),
            Phase(
                name.experts,
                self._experts,
                ("dispatched", "context"),
                outputs=("expert_out",),
            ),
            Phase(
                name.combine,
                self._combine,
                ("expert_out", "probs", "origin"),
                outputs=("y",),
            ),
            Phase(name.finish, self._finish, summed, outputs=("x",)),
        )

    def _norm(self, x_BsD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        return self.norm.beside(x_BsD, context.recompute, context.sink)

    @torch.no_grad()
    def _preprocess(self, experts_TK: Tensor) -> tuple[Prepared]:
        drops = self.moe.capacity_factor is not None
        rows = self.planned.rows_per_expert(len(experts_TK))
        return (self.dispatcher.preprocess(experts_TK, drops, rows),)

    def _dispatch(self, h_BsD: Tensor, prepared: Prepared) -> tuple[Dispatched, Origin]:
        return self.dispatcher.dispatch(h_BsD.flatten(0, -2), prepared)

    def _experts(self, dispatched: Dispatched, context: Context) -> tuple[Tensor]:
        return (self.experts(dispatched, context.sink, recompute=context.recompute),)

    def _combine(self, expert_out_RD: Tensor, probs_TK: Tensor, origin: Origin) -> tuple[Tensor]:
        return (self.dispatcher.combine(expert_out_RD, probs_TK, origin),)

    def _shared(self, h: Tensor, context: Context) -> tuple[Tensor]:
        if self.side is None:
            return (self._shared_expert(h, context),)
        self.side.wait_stream(torch.cuda.current_stream())
        # autograd runs its backward there too, and waits where gradients meet
        with torch.cuda.stream(self.side):
            out = self._shared_expert(h, context)
        # keeps the allocator from reusing h's memory before the side stream is done with it
        h.record_stream(self.side)
        return (out,)

    def _shared_expert(self, h: Tensor, context: Context) -> Tensor:
        return context.recompute.checkpoint(Recompute.shared, self._gated, h, context.sink)

    def _gated(self, h: Tensor, sink: WeightGradSink | None) -> Tensor:
        assert self.shared is not None
        out: Tensor = self.shared(h, sink)
        return out if self.shared_gate is None else F.linear(h, self.shared_gate).sigmoid() * out

    def _finish(
        self, x_BsD: Tensor, y_TD: Tensor, shared_BsD: Tensor | None = None
    ) -> tuple[Tensor]:
        out_BsD = self.add(x_BsD, y_TD.view_as(x_BsD))
        if shared_BsD is None:
            return (out_BsD,)
        if self.side is not None:
            main = torch.cuda.current_stream()
            main.wait_stream(self.side)
            shared_BsD.record_stream(main)
        return (self.add(out_BsD, shared_BsD),)
