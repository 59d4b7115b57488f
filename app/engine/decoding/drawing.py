"""Sample the next token from its logits, on rank 0 for all ranks.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.ranks.groups import Groups
from app.errors import ConfigError

ENDED = -1  # sent in place of a token once sampling has ended


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters: temperature, top-k, and top-p (nucleus) among the top k."""

    temperature: float = 1.0  # divides logits; 0 means greedy
    top_k: int | None = None  # None keeps all
    top_p: float | None = None  # None keeps all

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError("temperature", self.temperature, "must be at least 0", nearest=0)
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError("top_k", self.top_k, "must be at least 1", nearest=1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError("top_p", self.top_p, "must be above 0 and at most 1", nearest=0.9)

    def draw(
        self,
        logits_BV: Tensor,
        generator: torch.Generator,
        first: int = 0,
        *,
        together: int | None = None,
    ) -> Tensor:
        """Draw a token of each sequence, int64 [B], on the generator's device.

        The B sequences are numbers `first` to first + B - 1 of `together` (None: B). Callers that
        draw other parts with equally seeded generators get the tokens of one draw for all.
        """
        logits_BV = logits_BV.to(generator.device)
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        count, device = len(logits_BV), generator.device
        shares = torch.rand(
            together or count, generator=generator, dtype=torch.float64, device=device
        )
        below_BV = self.probabilities(logits_BV).double().cumsum(-1)
        wanted_B1 = shares[first : first + count, None] * below_BV[:, -1:]
        # inverse CDF; `right` skips tokens of probability 0
        drawn_B1 = torch.searchsorted(below_BV, wanted_B1, right=True)
        return drawn_B1[:, 0].clamp(max=logits_BV.shape[1] - 1)

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """Return the probability of each token, B × V; rows add up to 1. Not for temperature 0."""
        scaled_BV = logits_BV / self.temperature
        if self.top_k is not None and self.top_k < scaled_BV.shape[1]:
            least_B1 = scaled_BV.topk(self.top_k).values[:, -1:]
            scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -torch.inf)
        probs_BV = scaled_BV.softmax(-1)
        if self.top_p is None:
            return probs_BV
        falling_BV, token_BV = probs_BV.sort(descending=True, stable=True)
        # keep tokens until those before reach top_p
        enough_BV = falling_BV.cumsum(-1) - falling_BV >= self.top_p
        kept_BV = torch.zeros_like(probs_BV).scatter(
            1, token_BV, falling_BV.masked_fill(enough_BV, 0)
        )
        return kept_BV / kept_BV.sum(-1, keepdim=True)


def or_ended(tokens_B: Tensor, ended: bool) -> Tensor:
    """Return the tokens, or ENDED in their place once sampling has `ended`."""
    return torch.full_like(tokens_B, ENDED) if ended else tokens_B


def unless_ended(said_B: Tensor) -> list[int] | None:
    """Return the tokens of `or_ended` as a list; None if it said that sampling has ended."""
    tokens: list[int] = said_B.tolist()
    return None if ENDED in tokens else tokens


def agreed(groups: Groups, tokens_B: Tensor, ended: bool) -> list[int] | None:
    """Return rank 0's tokens on every rank; None if rank 0 has `ended`."""
    said_B = or_ended(tokens_B, ended).cpu()
    if groups.host.size() > 1:
        dist.broadcast(said_B, src=0, group=groups.host)
    return unless_ended(said_B)
