"""One optimizer step of one rank, and one validation: everything between microbatches in and numbers out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from app.choices import Normalize
from app.compat import all_reduce
from app.config import Run
from app.data.feed import Batch
from app.engine.build import Engine, select_forward_backward
from app.engine.data_feed import StepInput, step_input
from app.engine.flight import StepTotals
from app.engine.report import StepFacts
from app.engine.signals import StopRequest
from app.moe.router import update_bias


class TrainingStep:
    """Forward, backward, clipping and update over the schedule's action list.

    The host waits once, at the end; an all-to-all dispatcher adds a wait per MoE layer and microbatch.
    """

    def __init__(self, engine: Engine, request: StopRequest | None = None) -> None:
        self.run, self.engine, self.request = engine.plan.run, engine, request or StopRequest()
        self.forward_backward = select_forward_backward(engine, engine.plan.actions)

    def __call__(self, batches: Sequence[Batch], lr: float, weight_decay: float) -> tuple[StepFacts, StepTotals]:
        """Train on this rank's microbatches of one step."""
        optimizer = self.engine.optimizer
        loss_scale = self.engine.loss_scale
        scale = None if loss_scale is None else loss_scale.value
        step = _on_device(self.run, self.engine, batches, self.run.loss.normalize, scale)
        optimizer.zero_grad()
        for _, _, router in self.engine.routers():
            router.start_step()
        totals = self.forward_backward(step)
        optimizer.finish_grads()
        zeros = optimizer.local_zeros() if self.run.optim.count_zeros else 0.0
        facts_6 = _pack(optimizer.local_norm_sq(), totals, zeros, self.request)
        all_reduce(facts_6, self.engine.groups.world)
        skipped = optimizer.step(lr, weight_decay, facts_6[0].sqrt(), scale)
        self._balance(totals, skipped)
        norm_sq, *others, skip = torch.cat((facts_6, skipped[None])).tolist()
        self.engine.watch.rest()
        if loss_scale is None:
            return StepFacts(norm_sq, *others, skip), totals
        used = loss_scale.scale
        loss_scale.update(bool(skip))
        return StepFacts(norm_sq / used**2, *others, skip, used), totals

    def _balance(self, totals: StepTotals, skipped: Tensor) -> None:
        """Move the routers' selection bias against the load of the whole step, where that is on; not on a skipped one."""
        moe = self.run.model.moe
        if moe is None or not moe.bias_update_rate:
            return
        for _, place, router in self.engine.routers():
            counts_E = totals.counts[place].clone()
            all_reduce(counts_E, self.engine.groups.tokens)
            router.bias_E.copy_(
                torch.where(skipped > 0, router.bias_E, update_bias(router.bias_E, counts_E, moe.bias_update_rate))
            )


def _pack(norm_sq: Tensor, totals: StepTotals, zeros: Tensor | float, request: StopRequest) -> Tensor:
    """Sums of this rank that one all-reduce turns into sums over the step; fp32 [6]."""
    parts = (norm_sq, totals.loss, totals.aux_loss, totals.z_loss, zeros, float(request.wanted))
    # new_full is a kernel; a tensor made from a number of the host would wait for the device.
    return torch.stack([part.float() if isinstance(part, Tensor) else norm_sq.new_full((), part) for part in parts])


class Validation:
    """Mean token loss over fixed microbatches, forward only."""

    def __init__(self, engine: Engine, num_microbatches: int) -> None:
        self.run, self.engine = engine.plan.run, engine
        self.forward_only = select_forward_backward(engine, engine.plan.validation_actions(num_microbatches))

    def __call__(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """(nats per token, tokens) over the microbatches of all ranks."""
        step = _on_device(self.run, self.engine, batches, Normalize.token)
        # A number on ranks without a loss of their own; on all it has to be where their group can sum it.
        loss = torch.as_tensor(self.forward_only(step).loss, dtype=torch.float32, device=self.engine.device)
        all_reduce(loss, self.engine.groups.world)
        found = float(loss), int(step.valid)
        self.engine.watch.rest()
        return found


def _on_device(
    run: Run, engine: Engine, batches: Sequence[Batch], normalize: Normalize, scale: Tensor | None = None
) -> StepInput:
    return step_input(batches, normalize, run.dp, engine.groups, engine.device, scale)
