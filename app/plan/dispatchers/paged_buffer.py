"""How large the pool is that keeps experts' rows for backward (`app.moe.dispatch.paged_buffer`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from app.choices import Recompute
from app.config import Run
from app.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    MicrobatchChunk,
)
from app.plan.dispatchers.choose import run_dispatcher, tokens_per_rank
from app.plan.dispatchers.record import PlannedDispatcher
from app.plan.dispatchers.static import PlannedStatic
from app.plan.recompute import RecomputeChoice, recompute_policy
from app.plan.stages import Stage
from app.plan.trace.parts import BYTES

LARGEST, SMALLEST = 2**20, 2**9  # bytes of a page
NUMBER = 4  # bytes of a page's number
PAGES = 32  # of a tensor with the mean number of rows at least, where pages are not the smallest


@dataclass(frozen=True, slots=True)
class PlannedPagedBuffer:
    """Pages of one rank."""

    page: int  # bytes of each, a power of two
    pages: int

    @property
    def bytes(self) -> int:
        """Of all, of one more for what has none, and of their numbers."""
        return (self.page + NUMBER) * (self.pages + 1)


def planned_paged_buffer(
    run: Run, stages: Sequence[Stage], actions: Sequence[Action]
) -> PlannedPagedBuffer | None:
    """The pool of a rank with these stages and this list of actions; None: rows are kept as they
    are.

    For every tensor that is kept at once, the mean number of its rows times `static.paged_buffer`,
    in whole pages.
    """
    dispatcher = run_dispatcher(run)
    if not isinstance(dispatcher, PlannedStatic) or dispatcher.moe.static.paged_buffer is None:
        return None
    tokens = tokens_per_rank(run)
    mean = dispatcher.mean_rows(tokens)
    rows = min(ceil(dispatcher.moe.static.paged_buffer * mean), dispatcher.worst_rows(tokens))
    outer, inner = _widths(run, dispatcher)
    page = _page(mean * min(outer, inner))

    def pages(widths: Iterable[int], chunk: int) -> int:
        layers = sum(map(run.model.is_moe_layer, stages[chunk].layers))
        return layers * sum(ceil(rows * each / page) for each in widths)

    policy = recompute_policy(run).on_rank(actions)
    live: dict[MicrobatchChunk, int] = {}
    most = 0
    for action in actions:
        if isinstance(action, Forward):
            key = action.mb, action.chunk
            live[key] = pages(_kept(policy.of(key), outer, inner), action.chunk)
        elif isinstance(action, BackwardInput):
            live[action.mb, action.chunk] = pages(_waiting(outer, inner), action.chunk)
        elif isinstance(action, Backward | BackwardWeight):
            del live[action.mb, action.chunk]
        most = max(most, sum(live.values()))
    return PlannedPagedBuffer(page, max(1, most))


def page_numbers(run: Run, dispatcher: PlannedDispatcher, recompute: RecomputeChoice) -> int:
    """Bytes that say which pages the tensors of one layer have, of one microbatch, from forward to
    backward.
    """
    tokens = tokens_per_rank(run)
    outer, inner = _widths(run, dispatcher)
    page = _page(dispatcher.mean_rows(tokens) * min(outer, inner))
    rows = dispatcher.rows(tokens).computed
    kept = _kept(recompute, outer, inner)
    return sum(NUMBER * (2 + ceil(rows * each / page)) for each in kept)


def _widths(run: Run, dispatcher: PlannedDispatcher) -> tuple[int, int]:
    """Bytes of a row of hidden states, and of this rank's part of an expert's hidden width."""
    size = BYTES[run.precision.params]
    return run.model.hidden_size * size, dispatcher.moe.ffn_hidden_size // dispatcher.etp * size


def _kept(recompute: RecomputeChoice, outer: int, inner: int) -> tuple[int, ...]:
    """Bytes of a row of every tensor that backward needs of one layer: what came, both halves
    between the products, the activation, the result.
    """
    if recompute.whole_layers or Recompute.moe in recompute.parts:
        return ()
    act = () if Recompute.experts_act in recompute.parts else (inner,)
    return outer, 2 * inner, *act, outer


def _waiting(outer: int, inner: int) -> tuple[int, ...]:
    """Bytes of a row of what waits for the second part of a split backward: for each product what
    came, and the gradient of what it made.
    """
    return outer, 2 * inner, inner, outer


def with_paged_buffer(run: Run, paged_buffer: float | None) -> Run:
    """The run with such a pool, or with none."""
    moe = run.model.moe
    assert moe is not None
    static = replace(moe.static, paged_buffer=paged_buffer)
    return replace(run, model=replace(run.model, moe=replace(moe, static=static)))


def _page(tensor: int) -> int:
    """Bytes of a page where a small tensor has so many."""
    wanted = max(1, tensor // PAGES)
    return max(SMALLEST, min(LARGEST, 1 << (wanted.bit_length() - 1)))
