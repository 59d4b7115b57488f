"""Model chunk: one stage on one rank, with optional embedding, layers and optional head.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them between
matrices, D hidden, V vocabulary; in `ends_BD` D documents per sequence at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from app.config import LoraConfig, ModelConfig
from app.model.attention.over_ranks import documents_of_calls
from app.model.block import Layer, RoutingReport, RunPhases, run_layer
from app.model.layers.attend import BY_TORCH, Attend
from app.model.layers.layer_groups import ALONE, LayerGroups, size
from app.model.layers.layers import Context, layer_context
from app.model.layers.linear import (
    ColumnParallelLinear,
    embedding_table,
    named_parameters,
)
from app.model.layers.logits import logits_of
from app.model.layers.loss import summed_loss, token_losses
from app.model.layers.norms import norm_of_hidden
from app.model.layers.recompute import Recomputation
from app.model.layers.weight_grads import WeightGradSink
from app.plan.model.stage import NamedWeight, stage_weights
from app.plan.model.vocabulary import table
from app.plan.model.weight import Adapter
from app.plan.recompute import NOTHING, RecomputeChoice
from app.plan.stages import Stage

# parameters -> pre-hook that waits until they are gathered, which may be called without arguments
Gate = Callable[[Sequence[nn.Parameter]], Callable[..., None]]


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """Hidden states of a chunk (normalised if it has the head), and a router report per MoE
    layer.
    """

    x: Tensor
    routing: tuple[RoutingReport, ...]


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Cross-entropy of a microbatch on this rank, nats, summed over positions with a label."""

    objective: Tensor  # scalar with gradient
    each_BS: Tensor  # of the next token at every position, fp32, without gradients
    # scalar without gradient: of the next token, as it is reported; None: the objective
    told: Tensor | None = None


class Chunk(nn.Module):
    """Layers `layers` (global layer index -> layer) of a model, with embedding and head if asked.

    `attend` computes softmax attention; `chunk_tokens` is the number of tokens whose logits exist
    at once.
    """

    def __init__(
        self,
        model: ModelConfig,
        layers: Mapping[int, Layer],
        embedding: bool,
        head: bool,
        attend: Attend = BY_TORCH,
        layer_groups: LayerGroups = ALONE,
        chunk_tokens: int | None = None,
        rope_length: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.rope_length = rope_length
        self.layer_groups = layer_groups
        self.attend = attend
        self.chunk_tokens = chunk_tokens
        self.first = embedding
        self.last = head
        rows = table(model)
        # registered in the order of use, which is that of the optimizer's buffers
        self.embedding = (
            embedding_table(rows, layer_groups, model.embedding_scale) if embedding else None
        )
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        self.in_order = tuple(layers.values())
        # kinds of positions of its layers
        specs = (model.layer_specs[index].attention for index in layers)
        self.ropes = tuple(dict.fromkeys(spec.rope for spec in specs if spec.rope is not None))
        self.norm = norm_of_hidden(model) if head else None
        if head and not embedding and model.copies_embedding:
            # a last stage of its own has a copy of the first one's table
            self.embedding = embedding_table(rows, layer_groups, model.embedding_scale)
        untied = head and not model.tie_embeddings
        self.head = ColumnParallelLinear(rows, layer_groups) if untied else None
        self.logit_map = logits_of(model, layer_groups.coords.shape(rows)[0])
        self.lora: LoraConfig | None = None  # set where adapters are added
        self.recomputation: Callable[..., Recomputation] = Recomputation  # or what offloads
        # replaced with optim.overlap_params, where the head's table may still be gathered
        self.wait_for_head: Callable[[], None] = nothing

    @property
    def looks_up(self) -> bool:
        """True if it looks tokens up in its embedding."""
        return self.first

    def wait_with(self, gate: Gate) -> None:
        """Make each module's forward wait for its own parameters only (optim.overlap_params)."""
        inner = [*self.in_order, *([] if self.norm is None else [self.norm])]
        own = [self.embedding.weight] if self.looks_up and self.embedding is not None else []
        for module, params in ((self, own), *((module, module.parameters()) for module in inner)):
            wait = gate([param for param in params if param.requires_grad])
            module.register_forward_pre_hook(wait)
        if self.last and self.table.weight.requires_grad:
            self.wait_for_head = gate([self.table.weight])

    def weights(self) -> Iterator[tuple[NamedWeight, nn.Parameter]]:
        """Yield the description of every weight and this rank's shard of it, in order of use."""
        weights = stage_weights(self.model, self._stage, self.lora)
        found = zip(weights, named_parameters(self), strict=True)
        for named, (name, param) in found:
            assert named.name == name, f"{name} is described as {named.name}"
            yield named, param

    def adapted(self) -> Iterator[tuple[str, tuple[Adapter, ...]]]:
        """Yield the names of weights with adapters, and these."""
        for named in stage_weights(self.model, self._stage, self.lora):
            if named.weight.adapters:
                yield named.name, named.weight.adapters

    @property
    def _stage(self) -> Stage:
        return Stage(tuple(map(int, self.layers)), embedding=self.first, head=self.last)

    def context(
        self,
        positions_BS: Tensor,
        ends_BD: Tensor | None,
        sink: WeightGradSink | None = None,
        recompute: RecomputeChoice = NOTHING,
        length: int = 0,
        extras: Mapping[str, Tensor] | None = None,
    ) -> Context:
        """Build the inputs of the layers other than the hidden states.

        `ends_BD`: ends of documents in whole sequences (`app.data.feed.Batch`). Backward sends
        weight gradients to `sink` if given, and recomputes what `recompute` says. `length`: of
        sequences, as `RotaryTable.of`, unless all have the same (`rope_length`). `extras`: as
        `app.data.feed.Batch`.
        """
        documents = None
        if ends_BD is not None:
            length = positions_BS.shape[1] * size(self.layer_groups.cp)
            documents = documents_of_calls(ends_BD, length, self.layer_groups)
        moe = self.model.moe
        draws = moe is not None and moe.jitter_eps > 0
        paged_buffers = moe is not None and moe.static.paged_buffer is not None
        return layer_context(
            positions_BS,
            documents,
            self.ropes,
            attend=self.attend,
            sink=sink,
            recompute=self.recomputation(recompute, draws, replaces=paged_buffers),
            length=self.rope_length or length,
            extras=extras,
        )

    def forward(
        self,
        x: Tensor,
        context: Context,
        runs: Sequence[RunPhases] | None = None,
    ) -> ChunkOutput:
        """Map tokens B × S (first stage) or hidden states B × s × D -> B × s × D, s = S / tp.

        `runs` gives for each layer the function that runs its phases; None runs them eagerly.
        """
        if self.first:
            assert self.embedding is not None, "the first stage has the table"
            x = self.embedding.lookup(x)
        routing = []
        with context.recompute.forward():
            layers = self.decoder()
            for layer, run in zip(layers, runs or [run_layer] * len(layers), strict=True):
                x, report = context.recompute.whole_layer(layer, x, context, run)
                if report is not None:
                    routing.append(report)
        if self.norm is not None:
            x = self.norm(x, context.sink)
        return ChunkOutput(x, tuple(routing))

    def decoder(self) -> Sequence[Layer]:
        """Return the layers that the hidden states pass on their way to the next stage or the
        head.
        """
        return self.in_order

    def loss(self, x_BsD: Tensor, labels_BS: Tensor, context: Context) -> Tensor:
        """Return what the last stage's output is trained on, nats, summed over positions with a
        label; a scalar.
        """
        return self.losses_of(x_BsD, labels_BS, context).objective

    def losses_of(self, x_BsD: Tensor, labels_BS: Tensor, context: Context) -> TokenLosses:
        """Return the last stage's losses, given its output."""
        total, each_BS = self.weighted_loss(x_BsD, labels_BS, context)
        return TokenLosses(total, each_BS)

    def weighted_loss(
        self, x_BsD: Tensor, labels_BS: Tensor, context: Context, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `summed_loss` of the head's logits."""
        sink = context.sink
        if self.looks_up and self.head is None and sink is not None and not sink.deferred:
            # For a tied table on one stage, autograd sums both gradients and fires one hook: skip
            # the sink.
            sink = None
        self.wait_for_head()
        return summed_loss(
            x_BsD,
            self.table.weight,
            labels_BS,
            backend=self.table.backend,
            group=self.layer_groups.tp,
            chunk_tokens=self.chunk_tokens,
            sink=sink,
            logits=self.logit_map,
            weights=weights,
        )

    def logits(self, x_BsD: Tensor) -> Tensor:
        """Return this rank's columns of the logits of the last stage's output: B × S × V / tp."""
        self.wait_for_head()
        return self.logit_map.of(self.table.forward(x_BsD))

    def losses(self, x_BsD: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the cross-entropy of every label, nats, without gradients: fp32 B × S."""
        self.wait_for_head()
        table = self.table
        backend = self.logit_map.backend(table.backend)
        return token_losses(x_BsD, table.weight, labels_BS, backend, group=self.layer_groups.tp)

    @property
    def table(self) -> ColumnParallelLinear:
        """Return the head, V / tp rows of D: its own or the tied embedding."""
        table = self.embedding if self.head is None else self.head
        assert self.last and table is not None, "only the last stage has a head"
        return table


def nothing() -> None:
    """No-op: the parameters are complete already."""
