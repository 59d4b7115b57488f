"""Paged activation buffer: one pool of pages for the expert rows that backward needs, of all layers
and microbatches.

Tensors are allocated for as many rows as experts could be asked for; only the device knows how many
are used. The used rows are copied to as many pages as they take, and for backward into a new
tensor, whose other rows are uninitialised. Pages are allocated on the device (`app.kernels.pages`)
without synchronizing, so all of it can be captured, and graphs may be replayed in any order.

Shapes: as in `app.kernels.pages`; `ends_E` as in `app.moe.protocol`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

import torch
from torch import Tensor

from app.config import Run
from app.kernels import pages as kernels
from app.kernels.common import usable
from app.kernels.tiling import cdiv
from app.model.layers.linear import GroupedLinearBackend
from app.model.layers.recompute import BackwardSource, Recomputation
from app.model.layers.weight_grads import FetchedGrad, WeightGrad
from app.moe.dispatch.static import StaticDispatcher
from app.moe.experts import Dispatched, Experts
from app.moe.protocol import Dispatcher, Origin, Prepared
from app.plan.actions import Action
from app.plan.parts.paged_buffer import PlannedPagedBuffer, planned_paged_buffer
from app.plan.stages import Stage

WORD = 4  # bytes per copied element


class PagedBuffer:
    """Pool of one rank. If it runs out of pages, a tensor gets none and must not be used: `lacks`
    tells.
    """

    def __init__(self, planned: PlannedPagedBuffer, device: torch.device) -> None:
        self.state = torch.zeros(4, dtype=torch.int64, device=device)  # as in `app.kernels.pages`
        self._allocate(planned)

    def resize(self, planned: PlannedPagedBuffer) -> None:
        """Replace the memory of all pages; none may be in use."""
        del self.pool_NW, self.ring_N  # freed first, so that the new ones can reuse it
        self._allocate(planned)

    def _allocate(self, planned: PlannedPagedBuffer) -> None:
        self.planned = planned
        device = self.state.device
        words = planned.page // WORD
        # the last page, and the last place in the ring, take what plain torch must write somewhere
        self.pool_NW = torch.empty(planned.pages + 1, words, dtype=torch.int32, device=device)
        self.ring_N = torch.arange(planned.pages + 1, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Free all pages."""
        torch.arange(len(self.ring_N), out=self.ring_N)
        self.state.zero_()
        self.state[1:2].fill_(self.planned.pages)

    def needed(self) -> Tensor:
        """Return the most pages requested at once since `clear`: int64 [1]."""
        return self.state[3:]

    def lacks(self) -> Tensor:
        """Return whether more pages were requested than exist: bool [1]."""
        return self.needed() > self.planned.pages

    def put(self, rows: Tensor, used: Tensor) -> Tensor:
        """Copy the first `used` rows (int32 [1]) to pages; return the page table of
        `app.kernels.pages`.
        """
        row = rows[0].numel() * rows.element_size() // WORD
        page = self.pool_NW.shape[1]
        most = cdiv(rows.shape[0] * row, page)
        if usable(rows):
            ring_N = self.ring_N[:-1]
            pages_M2 = kernels.take(ring_N, self.state, used, most, row=row, page=page)
            kernels.copy_in(rows, self.pool_NW, pages_M2)
            return pages_M2
        pages_M2 = self._take(used, most, row)
        padded = rows.new_empty(most * page, dtype=torch.int32)
        words = rows.view(-1).view(torch.int32)
        padded[: len(words)] = words
        places = torch.where(_there(pages_M2), pages_M2[2:].long(), self.planned.pages)
        self.pool_NW.index_copy_(0, places, padded.view(most, page))
        return pages_M2

    def get(self, pages_M2: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the rows in a new contiguous tensor and free the pages."""
        rows = torch.empty(shape, dtype=dtype, device=self.state.device)
        if usable(rows):
            kernels.copy_out(rows, self.pool_NW, pages_M2)
            kernels.put_back(self.ring_N[:-1], self.state, pages_M2)
            return rows
        places = torch.where(_there(pages_M2), pages_M2[2:].long(), self.planned.pages)
        words = rows.view(-1).view(torch.int32)
        words.copy_(self.pool_NW.index_select(0, places).view(-1)[: len(words)])
        self._put_back(pages_M2)
        return rows

    def _take(self, used: Tensor, most: int, row: int) -> Tensor:
        head, tail, in_use, largest = self.state.unbind()
        page = self.pool_NW.shape[1]
        wanted = (used[0].long() * row + page - 1) // page
        count = wanted * (wanted <= tail - head)
        places = (head + torch.arange(most, device=head.device)) % self.planned.pages
        numbers = self.ring_N[places]
        head.add_(count)
        in_use.add_(wanted)
        torch.maximum(largest, in_use, out=largest)
        return torch.cat((torch.stack((count, wanted)).int(), numbers))

    def _put_back(self, pages_M2: Tensor) -> None:
        _, tail, in_use, _ = self.state.unbind()
        pages = self.planned.pages
        there_M = _there(pages_M2)
        places = (tail + torch.arange(len(there_M), device=tail.device)) % pages
        self.ring_N.scatter_(0, torch.where(there_M, places, pages), pages_M2[2:])
        tail.add_(pages_M2[0])
        in_use.sub_(pages_M2[1])


def _there(pages_M2: Tensor) -> Tensor:
    """Return which entries of a page table are in use."""
    return torch.arange(len(pages_M2) - 2, device=pages_M2.device) < pages_M2[0]


@dataclass(slots=True)
class PagedRows(BackwardSource):
    """Rows of one tensor, in pages from when the first operation saves them until backward reads
    them; then in memory of their own until the last reader has them.
    """

    paged_buffer: PagedBuffer
    used: Tensor  # int32 [1]
    shape: torch.Size
    dtype: torch.dtype
    pages_M2: Tensor | None = None
    rows: Tensor | None = None
    readers: int = 0

    @classmethod
    def of(cls, paged_buffer: PagedBuffer, ends_E: Tensor, rows: Tensor) -> PagedRows:
        """Build it for rows in complete storage, of which ends[-1] are used."""
        assert rows.is_contiguous() and not rows.storage_offset()
        return cls(paged_buffer, ends_E[-1:], rows.shape, dtype=rows.dtype)

    def add_reader(self, saved: Tensor) -> None:
        """Count a reader; the first one copies the rows. `saved` may be a part of every row."""
        if not self.readers:
            width = self.shape[1]
            rows = saved.detach().as_strided(self.shape, (width, 1), 0)
            self.pages_M2 = self.paged_buffer.put(rows, self.used)
        self.readers += 1

    def read(self) -> Tensor:
        """Return the rows, the same tensor for all readers."""
        if self.pages_M2 is not None:
            self.rows = self.paged_buffer.get(self.pages_M2, self.shape, self.dtype)
            self.pages_M2 = None
        rows = self.rows
        assert rows is not None, "read more often than saved"
        self.readers -= 1
        if not self.readers:
            self.rows = None
        return rows


@dataclass(frozen=True, slots=True)
class PagedDispatch(Dispatched):
    """Dispatched tokens whose rows backward reads from a paged buffer."""

    inner: Dispatched
    paged_buffer: PagedBuffer

    @classmethod
    def of(cls, inner: Dispatched, paged_buffer: PagedBuffer) -> PagedDispatch:
        """Wrap dispatched tokens."""
        return cls(inner.rows_RD, inner.ends_E, inner, paged_buffer=paged_buffer)

    def gemms(
        self, experts: Experts, deferred: bool
    ) -> tuple[GroupedLinearBackend, GroupedLinearBackend]:
        """Page the operands of weight gradients that are computed later."""
        up, down = self.inner.gemms(experts, deferred)
        if not deferred:
            return up, down
        # what outlives forward must not refer to the rows
        paged = partial(PagedRows.of, self.paged_buffer, self.ends_E)
        return PagedGemms(up, paged), PagedGemms(down, paged)

    def saved(self, rows: Tensor, recompute: Recomputation | None) -> Tensor:
        """Have operations that save these rows read them from pages."""
        if recompute is not None:
            recompute.replace(rows, PagedRows.of(self.paged_buffer, self.ends_E, rows))
        return self.inner.saved(rows, recompute)


@dataclass(frozen=True, slots=True)
class PagedGemms:
    """Grouped GEMMs whose weight gradients keep their operands in pages until they are computed
    (`GroupedLinearBackend`).
    """

    inner: GroupedLinearBackend
    paged: Callable[[Tensor], PagedRows]

    @property
    def differentiable(self) -> bool:
        """See the protocol."""
        return self.inner.differentiable

    @property
    def input_grad_first(self) -> bool:
        """See the protocol."""
        return self.inner.input_grad_first

    def output(self, rows_TI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        return self.inner.output(rows_TI, weight_EIO, ends_E)

    def input_grad(self, grad_TO: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        """See the protocol."""
        return self.inner.input_grad(grad_TO, weight_EIO, ends_E)

    def weight_grad(self, grad_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> WeightGrad:
        """See the protocol."""
        grad, rows = self.paged(grad_TO), self.paged(rows_TI)
        grad.add_reader(grad_TO)
        rows.add_reader(rows_TI)
        return FetchedGrad(lambda: self.inner.weight_grad(grad.read(), rows.read(), ends_E))


class PagingDispatcher(Generic[Prepared, Origin]):
    """Wrapper of a static dispatcher, with clones or without: the rows that backward needs are
    saved in a paged buffer.
    """

    def __init__(
        self,
        inner: Dispatcher[Prepared, Origin],
        static: StaticDispatcher,
        paged_buffer: PagedBuffer,
    ) -> None:
        self.inner = inner
        self.static = static
        self.paged_buffer = paged_buffer

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, rows_per_expert: int | None = None
    ) -> Prepared:
        """See the protocol."""
        return self.inner.preprocess(experts_TK, drops, rows_per_expert)

    def dispatch(self, x_TD: Tensor, prepared: Prepared) -> tuple[Dispatched, Origin]:
        """Map T × D -> R × D; leaves saving to autograd while there is memory for all rows."""
        dispatched, origin = self.inner.dispatch(x_TD, prepared)
        if not self.static.counts_rows:
            dispatched = PagedDispatch.of(dispatched, self.paged_buffer)
        return dispatched, origin

    def combine(self, expert_out_RD: Tensor, probs_TK: Tensor, origin: Origin) -> Tensor:
        """See the protocol."""
        return self.inner.combine(expert_out_RD, probs_TK, origin)


def build_paged_buffer(
    run: Run, stages: Sequence[Stage], actions: Sequence[Action], *, device: torch.device
) -> PagedBuffer | None:
    """Build the buffer of a pipeline rank with these stages and actions.

    None leaves saving to autograd.
    """
    planned = planned_paged_buffer(run, stages, actions)
    return None if planned is None else PagedBuffer(planned, device)
