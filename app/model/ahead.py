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
from torch import Tensor

from app.model.block import Layer, RoutingReport, RunPhases, StepState, run_layer
from app.model.chunk import Chunk, ChunkOutput, TokenLosses, nothing
from app.model.layers.layer_groups import rank
from app.model.layers.layers import Context

UNLABELLED = -100


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
    assert layer.ahead is not None, "it predicts a further token"
    x_BsD = layer.ahead(h_BsD, e_BsD, context.sink)
    x_BsD, report = layer(x_BsD, context, run)
    return layer.ahead.norm(x_BsD, context.sink), report


class AheadLosses(StepState):
    """Sums of this rank's losses and labels of each prediction ahead, from the start of a step."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.losses_K, self.counts_K = torch.zeros(2, layers, device=device)

    def start_step(self) -> None:
        """Clear the sums."""
        self.losses_K.zero_()
        self.counts_K.zero_()

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

    ahead_losses: AheadLosses  # set when the engine is built
    # replaced with optim.overlap_params, where parameters of the last layers may still be gathered
    wait_for_ahead: Callable[[], None] = staticmethod(nothing)

    def decoder(self) -> Sequence[Layer]:
        """See `Chunk`."""
        return self.in_order[: len(self.in_order) - self.model.mtp.layers]

    def forward(
        self, x: Tensor, context: Context, runs: Sequence[RunPhases] | None = None
    ) -> ChunkOutput:
        """See `Chunk`."""
        runs = runs or [run_layer] * len(self.in_order)
        first = len(self.decoder())
        out = super().forward(x, context, runs[:first])
        if context.ahead_2KBS is None:
            self.wait_for_ahead()
            return out
        assert self.embedding is not None, "the last stage has a copy"
        heads, routing = [out.x], [*out.routing]
        with context.recompute.forward():
            parts = zip(self.in_order[first:], context.ahead_2KBS[0], runs[first:], strict=True)
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
        if context.ahead_2KBS is None:
            return super().losses_of(x_BsD, labels_BS, context)
        labels_KBS = context.ahead_2KBS[1]
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
