"""Multi-token prediction: layers behind the decoder that predict further tokens in training
(DeepSeek-V3, arXiv 2412.19437, section 2.2).

Layer k of K takes, at position i, what the head reads of the prediction before (of the decoder for
k = 1) and the embedding of token i + k; norms of both are projected to hidden states, pass a
decoder layer and a norm, and the model's head predicts token i + k + 1 from them. Without any of
this the model still predicts the next token: validation and generation leave it out.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them between
matrices, D hidden, K layers of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from app.config import ModelConfig
from app.model.block import Layer, RoutingReport, RunPhases, StepState, run_layer
from app.model.chunk import Chunk, ChunkOutput, Gate, TokenLosses, nothing
from app.model.layers.layer_groups import ALONE, LayerGroups, rank
from app.model.layers.layers import Context
from app.model.layers.linear import ColumnParallelLinear
from app.model.layers.norms import norm_of_hidden
from app.model.layers.weight_grads import WeightGradSink
from app.plan.model.layer import AheadWeights

UNLABELLED = -100
AHEAD = "ahead"  # name of what `shifted` returns


class Ahead(nn.Module):
    """Inputs and output of a layer of multi-token prediction: norms and a projection before it, a
    norm behind.
    """

    def __init__(self, model: ModelConfig, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__()
        self.embedding_norm = norm_of_hidden(model)
        self.hidden_norm = norm_of_hidden(model)
        self.proj = ColumnParallelLinear(AheadWeights.of(model).proj, layer_groups)
        self.norm = norm_of_hidden(model)

    @classmethod
    def of(cls, layer: Layer) -> Ahead:
        """Return what a layer that predicts a further token has around it."""
        assert isinstance(layer.ahead, cls), "it predicts a further token"
        return layer.ahead

    def forward(self, h_BsD: Tensor, e_BsD: Tensor, sink: WeightGradSink | None) -> Tensor:
        """Return hidden states for the layer: B × s × D."""
        normed = self.embedding_norm(e_BsD, sink), self.hidden_norm(h_BsD, sink)
        return self.proj.forward(torch.cat(normed, dim=-1), sink)


def shifted(tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor, layers: int) -> Tensor:
    """Return the inputs and the labels of layers of multi-token prediction, int64 2 × K × B × S.

    Layer k takes token i + k at position i of whole sequences, and has the label of position i + k.
    A position has no label where that lies behind the sequence, or in another document.
    """
    both = []
    for k in range(1, layers + 1):
        token_BS, label_BS = torch.zeros_like(tokens_BS), torch.full_like(labels_BS, UNLABELLED)
        same_BS = positions_BS[:, k:] == positions_BS[:, :-k] + k
        token_BS[:, :-k] = tokens_BS[:, k:]
        label_BS[:, :-k] = torch.where(same_BS, labels_BS[:, k:], UNLABELLED)
        both.append(torch.stack((token_BS, label_BS)))
    return torch.stack(both, dim=1)


def predict(
    layer: Layer, h_BsD: Tensor, e_BsD: Tensor, context: Context, run: RunPhases
) -> tuple[Tensor, RoutingReport | None]:
    """Return what the head reads to predict one token further, and the router's report or None."""
    ahead = Ahead.of(layer)
    x_BsD, report = layer(ahead(h_BsD, e_BsD, context.sink), context, run)
    return ahead.norm(x_BsD, context.sink), report


class AheadLosses(StepState):
    """Sums of this rank's losses and labels of each prediction ahead, from the start of a step."""

    def __init__(self, layers: int, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.losses_K, self.counts_K = torch.zeros(2, layers, device=device)
        for chunk in chunks:
            if isinstance(chunk, PredictingChunk):
                chunk.ahead_losses = self

    def start_step(self) -> None:
        """Clear the sums."""
        self.losses_K.zero_()
        self.counts_K.zero_()

    def inputs(
        self, tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor
    ) -> Mapping[str, Tensor]:
        """See `shifted`."""
        return {AHEAD: shifted(tokens_BS, labels_BS, positions_BS, len(self.counts_K))}

    def add(self, losses_KBS: Tensor, labels_KBS: Tensor) -> None:
        """Count the losses of a microbatch."""
        self.losses_K += losses_KBS.sum(dim=(1, 2))
        self.counts_K += (labels_KBS >= 0).sum(dim=(1, 2))

    def sums(self) -> Mapping[str, Tensor]:
        """Return sums of losses, nats, and of labels."""
        losses = {f"mtp_loss/{k}": loss for k, loss in enumerate(self.losses_K, start=1)}
        counts = {f"mtp_labels/{k}": count for k, count in enumerate(self.counts_K, start=1)}
        return losses | counts

    def metrics(self, sums: Mapping[str, float]) -> Mapping[str, object]:
        """Return nats per label of each prediction ahead that has labels in this step."""
        counts = {k: sums[f"mtp_labels/{k}"] for k in range(1, len(self.counts_K) + 1)}
        return {"mtp_loss": {f"{k}": sums[f"mtp_loss/{k}"] / n for k, n in counts.items() if n}}


class PredictingChunk(Chunk):
    """Last stage of a model with multi-token prediction, whose last layers run behind its norm.

    Its output has the hidden states that the head reads of all predictions, one behind the other
    along the first dimension: (1 + K) · B × s × D in training, otherwise B × s × D.
    """

    looks_up = True
    ahead_losses: AheadLosses  # set when the engine is built
    # replaced with optim.overlap_params, where parameters of the last layers may still be gathered
    wait_for_ahead: Callable[[], None] = staticmethod(nothing)

    def decoder(self) -> Sequence[Layer]:
        """See `Chunk`."""
        return self.in_order[: -self.model.mtp.layers]

    @property
    def behind(self) -> Sequence[Layer]:
        """Layers of multi-token prediction."""
        return self.in_order[-self.model.mtp.layers :]

    def wait_with(self, gate: Gate) -> None:
        """See `Chunk`."""
        super().wait_with(gate)
        for layer in self.behind:
            ahead = Ahead.of(layer)
            ahead.register_forward_pre_hook(gate([*ahead.parameters()]))
        self.wait_for_ahead = gate([p for layer in self.behind for p in layer.parameters()])

    def forward(
        self, x: Tensor, context: Context, runs: Sequence[RunPhases] | None = None
    ) -> ChunkOutput:
        """See `Chunk`."""
        runs = runs or [run_layer] * len(self.in_order)
        first = len(self.decoder())
        out = super().forward(x, context, runs[:first])
        if AHEAD not in context.extras:
            self.wait_for_ahead()
            return out
        assert self.embedding is not None, "the last stage has a copy"
        heads, routing = [out.x], [*out.routing]
        with context.recompute.forward():
            tokens_KBS = context.extras[AHEAD][0]
            parts = zip(self.behind, tokens_KBS, runs[first:], strict=True)
            for layer, tokens_BS, run in parts:
                embedded_BsD = self.embedding.lookup(tokens_BS)
                one = partial(predict, layer)
                h_BsD, report = context.recompute.whole_layer(
                    one, heads[-1], embedded_BsD, context, run
                )
                heads.append(h_BsD)
                routing += [] if report is None else [report]
        return ChunkOutput(torch.cat(heads), tuple(routing))

    def losses_of(self, x_BsD: Tensor, labels_BS: Tensor, context: Context) -> TokenLosses:
        """See `Chunk`; the losses of further tokens are added by their weight."""
        if AHEAD not in context.extras:
            return super().losses_of(x_BsD, labels_BS, context)
        labels_KBS = context.extras[AHEAD][1]
        layers, count = len(labels_KBS), len(labels_BS)
        weights_B = x_BsD.new_full(
            (len(x_BsD),), self.model.mtp.loss_weight / layers, dtype=torch.float32
        )
        weights_B[:count] = 1
        labels = torch.cat((labels_BS, labels_KBS.flatten(0, 1)))
        total, each = self.weighted_loss(x_BsD, labels, context, weights_B[:, None])
        if rank(self.layer_groups.tp) == 0:  # all tensor-parallel ranks have the same ones
            self.ahead_losses.add(each[count:].view_as(labels_KBS), labels_KBS)
        return TokenLosses(total, each[:count], told=each[:count].sum())
