"""Parameters of a model and floating-point operations per token and per rank; docs/flops.md derives
them with examples.

A matrix product of [m, k] and [k, n] is 2·m·n·k operations, so each weight of a matrix costs 2 per
token forward, and twice that backward. Norms, activations, rotary positions and the embedding
lookup are not counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.choices import Recompute
from app.config import ModelConfig, MoEConfig, RecomputeConfig, Run
from app.plan.dispatchers.choose import busiest_load
from app.plan.layout import ParallelLayout
from app.plan.model.attention import AttentionWeights
from app.plan.model.layer import DenseBodyWeights, LayerWeights
from app.plan.model.stage import model_weights
from app.plan.model.vocabulary import table
from app.plan.model.weight import Weight
from app.plan.stages import Stage

# Dense bf16 tensor-core peaks without sparsity, TFLOP/s per GPU, from the vendors' data sheets:
# words that the device name must contain, and the peak. The first match counts, so variants stand
# before the plain name.
PEAKS: tuple[tuple[frozenset[str], float], ...] = tuple(
    (frozenset(words.split()), peak)
    for words, peak in (
        ("GB300", 2500.0),
        ("B300", 2250.0),
        ("GB200", 2500.0),
        ("B200", 2250.0),
        ("B100", 1750.0),
        ("H100 PCIE", 756.0),
        ("H100 NVL", 835.0),
        ("H200 NVL", 835.0),
        ("GH200", 989.0),
        ("H200", 989.0),
        ("H100", 989.0),
        ("H800", 989.0),
        ("H20", 148.0),
        ("A100", 312.0),
        ("A800", 312.0),
        ("A40", 150.0),
        ("A30", 165.0),
        ("A10G", 70.0),
        ("A10", 125.0),
        ("L40S", 362.0),
        ("L40", 181.0),
        ("L4", 121.0),
    )
)
PLANNED_PEAK = 989.0  # TFLOP/s that plans assume where hardware.peak_tflops is null: an H100's


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, in elements."""

    total: int  # all of them
    active: int  # those that one token uses: all but the experts it is not sent to
    embedding: int  # rows of the token table; it is the head as well when tied
    head: int  # the head's own matrix; 0 when tied
    experts: int  # routed experts of all layers: what expert parallelism divides


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Parameters of a model: all weights of its parts."""
    weights = [each.weight for each in model_weights(model)]
    rows = table(model).numel
    return ParameterCount(
        sum(weight.numel for weight in weights),
        sum(_used(weight, model.moe) for weight in weights),
        rows,
        head=0 if model.tie_embeddings else rows,
        experts=sum(weight.numel for weight in weights if weight.expert),
    )


def _used(weight: Weight, moe: MoEConfig | None) -> int:
    """Elements that one token uses."""
    if moe is None or not weight.expert:
        return weight.numel
    return weight.numel // moe.num_experts * moe.top_k


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Operations of forward and backward (twice forward) per token, at sequences of seq_len tokens.

    Recomputed forwards are not counted: this is the numerator of model FLOPs utilisation.
    """
    layers = sum(layer_forward(model, layer, seq_len).total for layer in range(model.num_layers))
    return 3.0 * (layers + head_forward(model))


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU in TFLOP/s by the name its driver reports; None: not known.

    The peak of a card limited in power or clocks is lower: measured ceilings beat these.
    """
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    return next((peak for needed, peak in PEAKS if needed <= words), None)


def attention_weights(model: ModelConfig) -> int:
    """Matrix elements of one layer's attention."""
    return AttentionWeights.of(model).matrix_elements


def _feed_forward(model: ModelConfig, layer: int) -> tuple[int, int, int, int]:
    """Matrix elements that a token uses of a layer's SwiGLU, or of its router, routed and gated
    shared experts.
    """
    body = LayerWeights.of(model, layer).body
    if isinstance(body, DenseBodyWeights):
        return body.matrix_elements, 0, 0, 0
    assert model.moe is not None
    router = body.router.matrix_elements
    experts = body.experts.matrix_elements
    shared = body.matrix_elements - router - experts
    return 0, router, experts // model.moe.num_experts * model.moe.top_k, shared


@dataclass(frozen=True, slots=True)
class LayerForward:
    """Operations of a layer's forward per token, by what recompute and parallelism tell apart."""

    projections: int  # queries, keys, values and output
    scores: int  # scores and weighted values: products of activations, half masked
    dense: int  # SwiGLU of a dense layer
    router: int
    routed: int  # the experts that a token is sent to
    shared: int  # shared expert and its gate

    @property
    def total(self) -> int:
        """FLOPs of a token in the layer's forward."""
        return self.projections + self.scores + self.dense + self.router + self.routed + self.shared

    def again(self, choice: RecomputeConfig) -> int:
        """What backward computes again. Norms and activations have no products: not counted."""
        if choice.full:
            return self.total
        scores = self.scores if Recompute.attn_core in choice.phases else 0
        if Recompute.moe in choice.phases:
            return scores + self.router + self.routed + self.shared
        return scores + (self.shared if Recompute.shared in choice.phases else 0)


def layer_forward(model: ModelConfig, layer: int, seq_len: int, load: float = 1.0) -> LayerForward:
    """Operations of decoder layer `layer` per token; `load` multiplies its routed experts'."""
    dense, router, routed, shared = (2 * weights for weights in _feed_forward(model, layer))
    # q·k and probabilities·v, each 2 · seq_len · N · H per token, half of it masked
    scores = 2 * seq_len * model.num_heads * model.head_width
    return LayerForward(
        2 * attention_weights(model),
        scores,
        dense,
        router=router,
        routed=round(load * routed),
        shared=shared,
    )


def head_forward(model: ModelConfig) -> int:
    """Operations of the head per token, tied to the embedding or not."""
    return 2 * table(model).numel


@dataclass(frozen=True, slots=True)
class StageFlops:
    """Operations of one stage on one rank for one microbatch."""

    forward: int
    # gradients of activations; all of attention's scores, which have no weights
    backward_input: int
    backward_weight: int  # gradients of weights
    recompute: int  # forwards that backward runs again

    @property
    def backward(self) -> int:
        """Both parts, without what is computed again."""
        return self.backward_input + self.backward_weight


def stage_flops(run: Run, stage: Stage, layout: ParallelLayout, load: float = 1.0) -> StageFlops:
    """Operations of one rank of a stage for one microbatch.

    A rank does 1 / (tp·cp) of the work of its microbatch's tokens: by width, or by tokens where
    weights are replicated. For routed experts this is the mean: an expert-parallel group shares its
    rows, `load` times the mean of them on this rank (`busiest_load` has that of the rank that the
    others wait for). With recompute.partial_microbatches, this is a microbatch that is not spared.
    """
    layers = [
        layer_forward(run.model, layer, run.train.seq_len, load=load) for layer in stage.layers
    ]
    scores = sum(layer.scores for layer in layers)
    products = (
        sum(layer.total for layer in layers)
        - scores
        + (head_forward(run.model) if stage.head else 0)
    )
    again = sum(layer.again(run.recompute) for layer in layers)
    if stage.head and run.loss.chunk_tokens is not None:
        again += head_forward(run.model)
    # seq_len is a multiple of tp·cp
    tokens = run.train.micro_batch * run.train.seq_len // (layout.tp * layout.cp)
    return StageFlops(
        tokens * (products + scores),
        tokens * (products + 2 * scores),
        tokens * products,
        recompute=tokens * again,
    )


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Estimated compute time of one microbatch in one stage, seconds."""

    forward: float
    backward_input: float  # with what is computed again
    backward_weight: float

    @property
    def total(self) -> float:
        """Seconds of forward and backward, recomputation included."""
        return self.forward + self.backward_input + self.backward_weight


def stage_seconds(run: Run, stage: Stage, layout: ParallelLayout) -> StageSeconds:
    """Operations of a stage's busiest rank over the hardware's peak_tflops · efficiency."""
    flops = stage_flops(run, stage, layout, load=busiest_load(run))
    rate = (run.hardware.peak_tflops or PLANNED_PEAK) * 1e12 * run.hardware.efficiency
    return StageSeconds(
        flops.forward / rate,
        (flops.backward_input + flops.recompute) / rate,
        flops.backward_weight / rate,
    )
