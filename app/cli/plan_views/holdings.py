"""What one rank holds of tokens, layers, widths and experts, as spans to be drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.plan.plan import Plan
from app.plan.sharding.blocks import ShardCoords

Span = tuple[float, float]  # where something begins and ends


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of a step and of the model."""

    stages: tuple[tuple[int, ...], ...]  # decoder layers of each of its stages
    embedding: bool
    head: bool
    tokens_inside: tuple[Span, ...]  # of a sequence, inside attention and matrices
    tokens_between: tuple[Span, ...]  # of a sequence, between them
    width: Span  # share of heads, hidden widths and vocabulary, of 1
    experts: Span  # of each layer's
    part: Span  # share of these experts' hidden width, of 1
    replica: int


def holding(plan: Plan, rank: int) -> Holding:
    """That of a global rank."""
    layout = plan.layout
    model = plan.run.model
    seq_len = plan.run.train.seq_len
    place = ShardCoords.of(layout, rank)
    coords = layout.coords(rank)
    stages = plan.stages.stages[coords["pp"]]
    inside = sequence_pieces(seq_len, layout.cp, coords["cp"])
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
    """Where a whole of 1 is cut into equal parts."""
    return [nth / parts for nth in range(1, parts)]


def share(whole: float, index: int, parts: int) -> Span:
    """Where part `index` of equal parts of something begins and ends."""
    return whole * index / parts, whole * (index + 1) / parts


def sequence_pieces(seq_len: int, cp: int, cp_rank: int) -> tuple[Span, ...]:
    """The tokens of a context-parallel rank: two of 2·cp pieces, of which each late one goes
    with an early one.
    """
    if cp == 1:
        return ((0, seq_len),)
    return share(seq_len, cp_rank, 2 * cp), share(seq_len, 2 * cp - 1 - cp_rank, 2 * cp)


def part_of(spans: Sequence[Span], index: int, parts: int) -> Iterator[Span]:
    """Where part `index` of all spans, laid end to end, is."""
    low, high = share(sum(end - start for start, end in spans), index, parts)
    for start, end in spans:
        cut = max(start, start + low), min(end, start + high)
        if cut[0] < cut[1]:
            yield cut
        low = low - (end - start)
        high = high - (end - start)
