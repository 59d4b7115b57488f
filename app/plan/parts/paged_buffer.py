"""Size of the paged buffer for experts' saved activations (`app.moe.dispatch.paged_buffer`)."""

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
from app.plan.parts.dispatch_record import PlannedDispatcher
from app.plan.parts.dispatcher import run_dispatcher, tokens_per_rank
from app.plan.parts.static import PlannedStatic
from app.plan.parts.trace import BYTES
from app.plan.recompute import RecomputeChoice, recompute_policy
from app.plan.stages import Stage

# bounds of a page, bytes: large pages copy fast, small ones waste little
LARGEST, SMALLEST = 2**20, 2**9
NUMBER = 4  # bytes of an entry of a page table
PAGES = 32  # pages at least of a tensor with the mean number of rows, unless pages are the smallest


@dataclass(frozen=True, slots=True)
class PlannedPagedBuffer:
    """Paged buffer of one rank."""

    page: int  # bytes of a page, a power of two
    pages: int

    @property
    def bytes(self) -> int:
        """Bytes of all pages, of one more for masked writes, and of the ring of free page
        numbers.
        """
        return (self.page + NUMBER) * (self.pages + 1)


def planned_paged_buffer(
    run: Run, stages: Sequence[Stage], actions: Sequence[Action]
) -> PlannedPagedBuffer | None:
    """Return the paged buffer of a rank with these stages and actions.

    None if rows are saved as they are. It has room for every tensor saved at the same time, each
    with `static.paged_buffer` times the mean number of rows, in whole pages.
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


def _widths(run: Run, dispatcher: PlannedDispatcher) -> tuple[int, int]:
    """Return bytes of a row of hidden states, and of this rank's part of an expert's ffn width."""
    size = BYTES[run.precision.params]
    return run.model.hidden_size * size, dispatcher.moe.ffn_hidden_size // dispatcher.etp * size


def _kept(recompute: RecomputeChoice, outer: int, inner: int) -> tuple[int, ...]:
    """Return bytes per row of every tensor that a layer saves for backward.

    These are the experts' input, gate and up projection, the activation, and the output.
    """
    if recompute.whole_layers or Recompute.moe in recompute.parts:
        return ()
    act = () if Recompute.experts_act in recompute.parts else (inner,)
    return outer, 2 * inner, *act, outer


def _waiting(outer: int, inner: int) -> tuple[int, ...]:
    """Return bytes per row of every tensor that waits for the second part of a split backward.

    For each of the two GEMMs these are its input and the gradient of its output.
    """
    return outer, 2 * inner, inner, outer


def with_paged_buffer(run: Run, paged_buffer: float | None) -> Run:
    """Return the run with this size of the paged buffer; None turns it off."""
    moe = run.model.moe
    assert moe is not None
    static = replace(moe.static, paged_buffer=paged_buffer)
    return replace(run, model=replace(run.model, moe=replace(moe, static=static)))


def _page(tensor: int) -> int:
    """Return bytes of a page if the smallest tensor has this many."""
    wanted = max(1, tensor // PAGES)
    return max(SMALLEST, min(LARGEST, 1 << (wanted.bit_length() - 1)))
