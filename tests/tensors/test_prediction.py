"""Multi-token prediction beside its formulas (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.config import ModelConfig
from app.config.model import MTPConfig
from app.data.feed import IGNORED, make_batch
from app.model.ahead import AHEAD, AheadLosses, PredictingChunk, shifted
from tests.runs import TINY
from tests.tensors.models import draw_tokens, make_chunk

LAYERS, WEIGHT = 2, 0.6
MODEL = dataclasses.replace(TINY, mtp=MTPConfig(LAYERS, WEIGHT))
DENSE = dataclasses.replace(MODEL, moe=None)  # grouped GEMMs have no fp64
TIED = dataclasses.replace(DENSE, tie_embeddings=True)


def loss_by_formulas(chunk: PredictingChunk, tokens_BS1: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss of the next token and those of further ones, nats summed over tokens; each of them
    computed over the positions that have a label only.
    """
    (table,) = (p for name, p in chunk.named_parameters() if name == "embedding.weight")
    head = table if chunk.head is None else chunk.head.weight
    tokens_BS, seq_len, eps = tokens_BS1[:, :-1], tokens_BS1.shape[1] - 1, chunk.model.norm_eps

    def normed(x: Tensor, norm: torch.nn.Module) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], norm.weight, eps)

    def context(length: int):
        return chunk.context(torch.arange(length).expand(len(tokens_BS), length), None)

    def loss(h_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        logits = h_BSD @ head.T
        return F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten(), reduction="sum")

    x = table[tokens_BS]
    for layer in chunk.decoder():
        x, _ = layer(x, context(seq_len))
    h = normed(x, chunk.norm)
    first, further = loss(h, tokens_BS1[:, 1:]), []
    for k, layer in enumerate(chunk.behind, start=1):
        left = seq_len - k
        pair = (
            normed(table[tokens_BS[:, k:]], layer.ahead.embedding_norm),
            normed(h[:, :left], layer.ahead.hidden_norm),
        )
        x, _ = layer(torch.cat(pair, dim=-1) @ layer.ahead.proj.weight.T, context(left))
        h = normed(x, layer.ahead.norm)
        further.append(loss(h, tokens_BS1[:, k + 1 :]))
    return first, further


def double_chunk(model: ModelConfig) -> PredictingChunk:
    chunk = make_chunk(model).double()
    assert isinstance(chunk, PredictingChunk)
    AheadLosses(LAYERS, [chunk], torch.device("cpu"))
    return chunk


@pytest.mark.parametrize("model", [DENSE, TIED], ids=["head", "tied"])
def test_losses_and_gradients_equal_the_formulas(model: ModelConfig):
    chunk = double_chunk(model)
    rows = draw_tokens(model, 3, 17)
    batch = make_batch([*rows.numpy()], None)
    ahead = shifted(batch.tokens_BS, batch.labels_BS, batch.positions_BS, LAYERS)
    context = chunk.context(batch.positions_BS, None, extras={AHEAD: ahead})
    losses = chunk.losses_of(chunk(batch.tokens_BS, context).x, batch.labels_BS, context)
    first, further = loss_by_formulas(chunk, rows)
    wanted = first + WEIGHT * sum(further) / LAYERS
    params = dict(chunk.named_parameters())
    found = torch.autograd.grad(losses.objective, list(params.values()))
    by_formulas = torch.autograd.grad(wanted, list(params.values()))
    torch.testing.assert_close(losses.told.double(), first.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(losses.objective.double(), wanted, rtol=1e-6, atol=0)
    of_layers = chunk.ahead_losses.sums()
    for k, loss in enumerate(further, start=1):
        told = of_layers[f"mtp_loss/{k}"] / of_layers[f"mtp_labels/{k}"]
        torch.testing.assert_close(told.double(), loss.detach() / (3 * (16 - k)), rtol=1e-6, atol=0)
    for name, mine, theirs in zip(params, found, by_formulas, strict=True):
        assert theirs.abs().max() > 0, name
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()))


def test_labels_ahead_end_with_sequences_documents_and_masks():
    rows = torch.tensor([[5, 6, 0, 7, 8, 9, 0, 4]])
    batch = make_batch([*rows.numpy()], 0)
    masked = batch.labels_BS.masked_fill(batch.labels_BS == 8, IGNORED)
    tokens_KBS, labels_KBS = shifted(batch.tokens_BS, masked, batch.positions_BS, 2)
    assert tokens_KBS.tolist() == [[[6, 0, 7, 8, 9, 0, 0]], [[0, 7, 8, 9, 0, 0, 0]]]
    no = IGNORED
    assert labels_KBS.tolist() == [[[0, no, no, 9, 0, no, no]], [[no, no, no, 0, no, no, no]]]


def test_validation_predicts_the_next_token_only():
    chunk = make_chunk(MODEL)
    batch = make_batch([*draw_tokens(MODEL, 2, 9).numpy()], None)
    context = chunk.context(batch.positions_BS, None)
    out = chunk(batch.tokens_BS, context)
    assert out.x.shape == (2, 8, MODEL.hidden_size)
    assert len(out.routing) == MODEL.num_layers - MODEL.moe.first_k_dense
    assert chunk.losses_of(out.x, batch.labels_BS, context).told is None
