"""Shares of tokens, layers, widths and experts that one rank holds, as spans to be drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.plan.sharding.blocks import ShardCoords
from app.planner.plan import Plan

Span = tuple[float, float]  # start, end


@dataclass(frozen=True, slots=True)
class Holding:
    """Shares of the sequence and of the model that one rank holds."""

    stages: tuple[tuple[int, ...], ...]  # decoder layers of each of its stages
    embedding: bool
    head: bool
    tokens_inside: tuple[Span, ...]  # positions of a sequence, inside attention and matrices
    tokens_between: tuple[Span, ...]  # positions between them, where sequence parallelism cuts
    width: Span  # share of heads, hidden widths and vocabulary; 0 to 1
    experts: Span  # experts of each layer
    part: Span  # share of these experts' hidden width; 0 to 1
    replica: int


def holding(plan: Plan, rank: int) -> Holding:
    """Return the shares of a global rank."""
    layout = plan.layout
    model = plan.run.model
    seq_len = plan.run.train.seq_len
    place = ShardCoords.of(layout, rank)
    coords = layout.coords(rank)
    stages = plan.stages.stages[coords["pp"]]
    inside = sequence_chunks(seq_len, layout.cp, coords["cp"])
    experts = share(model.moe.num_experts if model.moe else 0, *place.ep)
    return Holding(
        tuple(stage.layers for stage in stages),
        any(stage.embedding for stage in stages),
        any(stage.head for stage in stages),
        tokens_inside=inside,
        tokens_between=tuple(part_of(inside, *place.tp)),
        width=share(1, *place.tp),
        experts=experts,
        part=share(1, *place.etp),
        replica=coords["dp"],
    )


def cuts(parts: int) -> list[float]:
    """Return the positions that cut [0, 1] into equal parts."""
    return [nth / parts for nth in range(1, parts)]


def share(whole: float, index: int, parts: int) -> Span:
    """Return the span of part `index` of `parts` equal parts of [0, whole]."""
    return whole * index / parts, whole * (index + 1) / parts


def sequence_chunks(seq_len: int, cp: int, cp_rank: int) -> tuple[Span, ...]:
    """Return the tokens of a context-parallel rank: chunks r and 2·cp - 1 - r of 2·cp.

    An early chunk is paired with a late one, because causal attention makes late tokens dearer.
    """
    if cp == 1:
        return ((0, seq_len),)
    return share(seq_len, cp_rank, 2 * cp), share(seq_len, 2 * cp - 1 - cp_rank, 2 * cp)


def part_of(spans: Sequence[Span], index: int, parts: int) -> Iterator[Span]:
    """Yield part `index` of `parts` equal parts of the spans, counted end to end."""
    low, high = share(sum(end - start for start, end in spans), index, parts)
    for start, end in spans:
        cut = max(start, start + low), min(end, start + high)
        if cut[0] < cut[1]:
            yield cut
        low = low - (end - start)
        high = high - (end - start)
