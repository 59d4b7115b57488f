"""A decoder layer is an ordered list of phases with declared inputs and outputs.

The same list is run eagerly here, captured in part (`app.engine.capture.partial`) and recomputed
in part (`run_layer`), because a phase touches nothing but its declared values and its parameters.
What a feature keeps from step to step beside its parameters is a `StepState`.

Shapes: B sequences, s tokens per sequence of this rank, D hidden, E experts of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from torch import Tensor, nn

from app.choices import BlockKind, Recompute
from app.config import AttentionSpec, ModelConfig
from app.model.attention.modules import attention
from app.model.layers.layer_groups import ALONE, LayerGroups
from app.model.layers.layers import Context, RMSNorm, mlp
from app.model.layers.norms import norm_of_hidden
from app.model.layers.residual import residual_sum
from app.plan.model.layer import DenseBodyWeights
from app.plan.phases import PhaseName

T = TypeVar("T")
LAYER_OUTPUTS = ("x", "routing")  # hidden states; the router's report or None
Outputs = tuple[Tensor, ...]  # of a phase
# hidden states that attention takes -> its output, which the layer adds to the residual
AttendHidden = Callable[[Tensor, Context], Tensor]


@dataclass(frozen=True, slots=True)
class Phase:
    """One element of a layer: `run` takes the values named in `inputs` and returns `outputs`."""

    name: PhaseName
    run: Callable[..., tuple[object, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    host_sync: bool = False  # True if the host waits for the device


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """Losses and counts of one router for one microbatch."""

    # scalar with gradient: this rank's share of the auxiliary losses, with their weights
    loss: Tensor
    aux_loss: Tensor  # scalar, weighted, detached
    z_loss: Tensor  # scalar, weighted, detached
    counts_E: Tensor  # int64: tokens of this rank that each expert of the whole layer computes
    dropped: Tensor  # int64 scalar: (token, expert) pairs of this rank beyond the experts' capacity


def value_of(values: Mapping[str, object], name: str, kind: type[T]) -> T:
    """Return the value of this name; AssertionError if it has another type."""
    value = values[name]
    assert isinstance(value, kind), f"{name} is not a {kind.__name__}"
    return value


def run_phases(
    phases: Sequence[Phase], values: Mapping[str, object], keep: Sequence[str]
) -> dict[str, object]:
    """Run `phases` in order over `values` (name -> value) and return the values named in `keep`.

    A value is dropped after the last phase that reads it, so that memory is freed unless autograd
    saved it.
    """
    last_reader = {name: index for index, phase in enumerate(phases) for name in phase.inputs}
    last_reader.update(dict.fromkeys(keep, len(phases)))
    known = dict(values)
    for index, phase in enumerate(phases):
        outputs = phase.run(*[known[name] for name in phase.inputs])
        known.update(zip(phase.outputs, outputs, strict=True))
        for name in phase.inputs:
            if last_reader[name] == index:
                del known[name]
    return {name: known.get(name) for name in keep}


class RunPhases(Protocol):
    """Function that runs the phases of a layer: `run_layer`, or partly captured
    (`PartialGraphs`).
    """

    def __call__(
        self, phases: Sequence[Phase], values: Mapping[str, object], keep: Sequence[str]
    ) -> dict[str, object]:
        """Run the phases on `values` (name -> value) and return the values named in `keep`."""


def run_layer(
    phases: Sequence[Phase], values: Mapping[str, object], keep: Sequence[str]
) -> dict[str, object]:
    """Run `run_phases` for a layer or a part of one; `Recompute.moe` recomputes everything after
    attention in backward.
    """
    recompute = value_of(values, "context", Context).recompute
    if not recompute.recomputes(Recompute.moe) or not _routes(phases):
        return run_phases(phases, values, keep)
    start = int(phases[0].name is PhaseName.attn)
    before = run_phases(phases[:start], values, keep=("x", "context"))

    def behind(x_BsD: Tensor, context: Context) -> dict[str, object]:
        return run_phases(phases[start:], {"x": x_BsD, "context": context}, keep)

    x_BsD = value_of(before, "x", Tensor)
    return recompute.checkpoint(Recompute.moe, behind, x_BsD, value_of(before, "context", Context))


def _routes(phases: Sequence[Phase]) -> bool:
    return any(phase.name is PhaseName.route for phase in phases)


class Body(nn.Module):
    """Part of a layer after attention, as phases."""

    phases: tuple[Phase, ...]


class Layer(nn.Module):
    """Decoder layer: an attention phase, x + attention(norm(x)), then the phases of its dense or
    MoE `body`.

    `phases` read and write the values x (B × s × D), context (Context) and those they declare.
    Subclasses have other norms and residual connections (`BlockKind`).
    """

    norm_before: ClassVar[bool] = True  # on the residual
    norm_behind: ClassVar[bool] = False  # on attention's output
    follows: bool = True  # its input is the output of the layer before (`LayerSpec.follows`)
    outputs: ClassVar[tuple[str, ...]] = ("x",)  # of the attention phase
    attn_norm: RMSNorm
    attn_out_norm: RMSNorm

    def __init__(
        self,
        model: ModelConfig,
        spec: AttentionSpec,
        body: Body,
        layer_groups: LayerGroups = ALONE,
    ) -> None:
        super().__init__()
        if self.norm_before:
            self.attn_norm = norm_of_hidden(model)
        self.attn = attention(spec, layer_groups)
        if self.norm_behind:
            self.attn_out_norm = norm_of_hidden(model)
        self.body = body
        self.add = residual_sum(model)
        attn = Phase(PhaseName.attn, self._attend, ("x", "context"), outputs=self.outputs)
        self.phases: tuple[Phase, ...] = (attn, *body.phases)

    def attend_with(self, attend: AttendHidden, x_BsD: Tensor, context: Context) -> Outputs:
        """Return what the attention phase returns, with `attend` in place of the layer's own."""
        x_BsD, h_BsD = self.attn_norm.beside(x_BsD, context.recompute, context.sink)
        return (self.add(x_BsD, attend(h_BsD, context)),)

    def _attend(self, x_BsD: Tensor, context: Context) -> Outputs:
        return self.attend_with(self.attn, x_BsD, context)

    def forward(
        self, x_BsD: Tensor, context: Context, run: RunPhases = run_layer
    ) -> tuple[Tensor, RoutingReport | None]:
        """Map B × s × D -> (B × s × D, the router's report or None)."""
        out = run(self.phases, {"x": x_BsD, "context": context}, LAYER_OUTPUTS)
        report = None if out["routing"] is None else value_of(out, "routing", RoutingReport)
        return value_of(out, "x", Tensor), report


class NormAfterLayer(Layer):
    """x + norm(attention(x)), then the body (OLMo 2, arXiv 2501.00656)."""

    norm_before = False
    norm_behind = True

    def attend_with(self, attend: AttendHidden, x_BsD: Tensor, context: Context) -> Outputs:
        """See `Layer`."""
        out_BsD = self.attn_out_norm(attend(x_BsD, context), context.sink)
        return (self.add(x_BsD, out_BsD),)


class NormAroundLayer(Layer):
    """x + norm(attention(norm(x))), then the body (Gemma 2, arXiv 2408.00118)."""

    norm_behind = True

    def attend_with(self, attend: AttendHidden, x_BsD: Tensor, context: Context) -> Outputs:
        """See `Layer`."""
        x_BsD, h_BsD = self.attn_norm.beside(x_BsD, context.recompute, context.sink)
        out_BsD = self.attn_out_norm(attend(h_BsD, context), context.sink)
        return (self.add(x_BsD, out_BsD),)


class ParallelLayer(Layer):
    """x + attention(h), then the body, which adds feed-forward(h), with h = norm(x) for both."""

    outputs = ("x", "h")

    def attend_with(self, attend: AttendHidden, x_BsD: Tensor, context: Context) -> Outputs:
        """See `Layer`."""
        x_BsD, h_BsD = self.attn_norm.beside(x_BsD, context.recompute, context.sink)
        return self.add(x_BsD, attend(h_BsD, context)), h_BsD


class ParallelNormsLayer(Layer):
    """attended = x + attention(norm(x)), to which the body adds feed-forward(its norm(x))."""

    outputs = ("attended",)


class DenseBody(Body):
    """Feed-forward part of a dense layer, one phase: x + mlp(norm(x)).

    Subclasses have other norms, as in `Layer`.
    """

    norm_before: ClassVar[bool] = True
    norm_behind: ClassVar[bool] = False
    norm: RMSNorm
    out_norm: RMSNorm

    def __init__(self, model: ModelConfig, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__()
        if self.norm_before:
            self.norm = norm_of_hidden(model)
        self.mlp = mlp(model, DenseBodyWeights.of(model).mlp, layer_groups)
        if self.norm_behind:
            self.out_norm = norm_of_hidden(model)
        self.add = residual_sum(model)
        self.phases = (Phase(PhaseName.mlp, self._feed_forward, ("x", "context"), outputs=("x",)),)

    def _feed_forward(self, x_BsD: Tensor, context: Context) -> Outputs:
        x_BsD, h_BsD = self.norm.beside(x_BsD, context.recompute, context.sink)
        return (self.add(x_BsD, self.mlp(h_BsD, context.sink, context.recompute)),)


class NormAfterBody(DenseBody):
    """Feed-forward part of a dense layer, one phase: x + norm(mlp(x))."""

    norm_before = False
    norm_behind = True

    def _feed_forward(self, x_BsD: Tensor, context: Context) -> Outputs:
        out_BsD = self.mlp(x_BsD, context.sink, context.recompute)
        return (self.add(x_BsD, self.out_norm(out_BsD, context.sink)),)


class NormAroundBody(DenseBody):
    """Feed-forward part of a dense layer, one phase: x + norm(mlp(norm(x)))."""

    norm_behind = True

    def _feed_forward(self, x_BsD: Tensor, context: Context) -> Outputs:
        x_BsD, h_BsD = self.norm.beside(x_BsD, context.recompute, context.sink)
        out_BsD = self.mlp(h_BsD, context.sink, context.recompute)
        return (self.add(x_BsD, self.out_norm(out_BsD, context.sink)),)


class ParallelBody(Body):
    """Feed-forward part of a `ParallelLayer`, one phase: x + mlp(h)."""

    def __init__(self, model: ModelConfig, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__()
        self.mlp = mlp(model, DenseBodyWeights.of(model).mlp, layer_groups)
        self.add = residual_sum(model)
        read = ("x", "h", "context")
        self.phases = (Phase(PhaseName.mlp, self._feed_forward, read, outputs=("x",)),)

    def _feed_forward(self, x_BsD: Tensor, h_BsD: Tensor, context: Context) -> Outputs:
        return (self.add(x_BsD, self.mlp(h_BsD, context.sink, context.recompute)),)


class ParallelNormsBody(Body):
    """Feed-forward part of a `ParallelNormsLayer`, one phase: attended + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__()
        self.norm = norm_of_hidden(model)
        self.mlp = mlp(model, DenseBodyWeights.of(model).mlp, layer_groups)
        self.add = residual_sum(model)
        read = ("x", "attended", "context")
        self.phases = (Phase(PhaseName.mlp, self._feed_forward, read, outputs=("x",)),)

    def _feed_forward(self, x_BsD: Tensor, attended_BsD: Tensor, context: Context) -> Outputs:
        _, h_BsD = self.norm.beside(x_BsD, context.recompute, context.sink)
        return (self.add(attended_BsD, self.mlp(h_BsD, context.sink, context.recompute)),)


@dataclass(frozen=True, slots=True)
class BlockClasses:
    """Classes of a layer and of its dense body."""

    layer: Callable[[ModelConfig, AttentionSpec, Body, LayerGroups], Layer]
    dense: Callable[[ModelConfig, LayerGroups], Body]


BLOCKS = {
    BlockKind.norm_before: BlockClasses(Layer, DenseBody),
    BlockKind.norm_after: BlockClasses(NormAfterLayer, NormAfterBody),
    BlockKind.norm_around: BlockClasses(NormAroundLayer, NormAroundBody),
    BlockKind.parallel: BlockClasses(ParallelLayer, ParallelBody),
    BlockKind.parallel_norms: BlockClasses(ParallelNormsLayer, ParallelNormsBody),
}


class StepState:
    """State that must know where a step begins and ends; a run builds those of its features only.

    Each method does nothing unless overridden. All but `stepped` only launch device work, and may
    be captured.
    """

    @property
    def capturable(self) -> bool:
        """True if every later step launches the same kernels as this one."""
        return True

    def start_step(self) -> None:
        """Prepare for the first forward of a step, or of its rerun."""

    def end_passes(self) -> None:
        """Run the work that follows the last backward of a step, or of its rerun."""

    def inputs(
        self, tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor
    ) -> Mapping[str, Tensor]:
        """Return what layers need of a microbatch's whole sequences, by name: … × S, on the CPU.

        `Context.extras` has the part of this rank's tokens, on its device.
        """
        return {}

    def sums(self) -> Mapping[str, Tensor]:
        """Return scalars of this step by name, to be summed over all ranks."""
        return {}

    def finish_step(self, skipped: Tensor) -> None:
        """Run the work that follows the update; `skipped` is 1 if it was skipped, else 0."""

    def stepped(self, skipped: bool) -> None:
        """Note on the host whether the update was skipped."""

    def restored(self, updates: int) -> None:
        """Resume from a checkpoint that was taken after `updates` updates."""

    def metrics(self, sums: Mapping[str, float]) -> Mapping[str, object]:
        """Return metrics of this step (as `StepReport.take`) from its `sums` over all ranks."""
        return {}

    def on_trial(self) -> AbstractContextManager[None]:
        """Return a context for running layers outside of any step, to capture them."""
        return nullcontext()
