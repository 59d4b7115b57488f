"""Kernels of the loss and of the experts' rows against plain torch, at any size, on any device that
runs them.

Shapes: C tokens and V rows of the vocabulary; T tokens, K experts per token, E experts, R rows, D
width. Plain versions must be in place where these run: `usable` of their modules says no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import app.model.layers.loss
import app.moe.dispatch.expert_rows
import app.moe.echo
import app.moe.permute
import app.moe.router
from app.kernels import cross_entropy, rows
from app.kernels.grouped_gradient import add_grouped_gradient
from app.kernels.routing.top_experts import top_experts
from app.moe.permute import Permutation, combine_gradients, sort_by_expert, sum_rows
from tests.forks import Patches
from tests.rounding import expect_alike, in_fp64

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTS = {"device": DEVICE, "dtype": torch.float32}
# of one value, relative
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def without_kernels() -> Iterator[None]:
    """Everything takes the plain path; for a fixture."""
    with Patches.context() as patch:
        for module in (
            app.model.layers.loss,
            app.moe.dispatch.expert_rows,
            app.moe.echo,
            app.moe.permute,
            app.moe.router,
        ):
            patch.setattr(module, "usable", lambda *_: False)
        yield


def twice(run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Run twice, check that the results are equal bit for bit, and return them."""
    found = run()
    assert all(torch.equal(one, other) for one, other in zip(found, run(), strict=True))
    return found


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Bit for bit; but the interpreter cuts digits off where a GPU rounds."""
    assert found.dtype == wanted.dtype
    cut_off = DEVICE == "cpu" and wanted.dtype != torch.float32
    torch.testing.assert_close(
        found, wanted, rtol=2 * ROUNDING[wanted.dtype] if cut_off else 0, atol=0
    )


def check_statistics(tokens: int, vocabulary: int, dtype: torch.dtype, apart: int = 0) -> None:
    """Maximum and label to the bit, the sum to the rounding of its terms; labels of other ranks
    count as 0.
    """
    torch.manual_seed(0)
    logits_CV = (torch.randn(tokens, vocabulary + apart, **FACTS) * 4).to(dtype)[:, :vocabulary]
    row_C = torch.randint(-vocabulary // 2, 2 * vocabulary, (tokens,), device=DEVICE)
    row_C[:3] = torch.tensor([0, vocabulary - 1, vocabulary], device=DEVICE)
    found = twice(lambda: tuple(cross_entropy.statistics(logits_CV, row_C)))
    wanted = app.model.layers.loss._statistics(logits_CV, row_C)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[2])
    exact = (logits_CV.double() - wanted[0][:, None]).exp().sum(1)
    ones = torch.ones_like(exact)  # rows differ in size
    expect_alike({"sums": found[1] / exact}, {"sums": wanted[1] / exact}, {"sums": ones})


def check_into_gradient(
    tokens: int, vocabulary: int, dtype: torch.dtype, ignored: bool = False, apart: int = 0
) -> None:
    """Within one rounding of the plain gradient, which differs in the last bits of the
    exponential; ignored rows are zero.
    """
    torch.manual_seed(1)
    whole = (torch.randn(tokens, vocabulary + apart, **FACTS) * 4).to(dtype)
    row_C = torch.randint(-vocabulary // 2, 2 * vocabulary, (tokens,), device=DEVICE)
    lse_C = whole[:, :vocabulary].float().logsumexp(1)
    weight_C = torch.rand(tokens, **FACTS) * (0 if ignored else row_C % 3 != 0)

    def run() -> tuple[Tensor]:
        copy = whole.clone()
        assert (
            cross_entropy.into_gradient(copy[:, :vocabulary], row_C, lse_C, weight_C=weight_C)
            is None
        )
        return (copy,)

    (found,) = twice(run)
    # of what lies between, nothing was touched
    assert torch.equal(found[:, vocabulary:], whole[:, vocabulary:])
    wanted = whole[:, :vocabulary].clone()
    app.model.layers.loss.into_gradient(wanted, row_C, lse_C, weight_C)
    torch.testing.assert_close(found[:, :vocabulary], wanted, rtol=2 * ROUNDING[dtype], atol=1e-7)
    assert found[weight_C == 0, :vocabulary].eq(0).all()


@dataclass(frozen=True)
class Rows:
    """Tokens, and where their rows are."""

    x_TD: Tensor
    probs_TK: Tensor
    record: Permutation
    owned_R: Tensor


def draw_rows(
    tokens: int,
    top_k: int,
    experts: int,
    width: int,
    dtype: torch.dtype,
    drops: bool = False,
    rows_per_expert: int | None = None,
) -> Rows:
    """A random choice; with drops three of eight choices, the second token's and expert 0's have
    no row.
    """
    torch.manual_seed(2)
    chosen_TK = torch.rand(tokens, experts, **FACTS).topk(top_k, dim=1).indices.sort(dim=1).values
    if drops:
        gone_TK = (torch.rand(tokens, top_k, **FACTS) < 3 / 8) | (chosen_TK == 0)
        gone_TK[1:2] = True
        chosen_TK = chosen_TK.masked_fill(gone_TK, experts)
    record = sort_by_expert(chosen_TK, experts, drops, rows_per_expert=rows_per_expert)
    owned_R = torch.zeros(len(record.token_of_row_R), dtype=torch.bool, device=DEVICE)
    owned_R[record.row_of_TK[chosen_TK < experts]] = True
    return Rows(
        torch.randn(tokens, width, **FACTS).to(dtype),
        torch.rand(tokens, top_k, **FACTS),
        record,
        owned_R=owned_R,
    )


def check_spread(drawn: Rows) -> None:
    """Copies, and zeros where nobody reads."""
    record = drawn.record
    (found,) = twice(
        lambda: (
            rows.spread_rows(
                drawn.x_TD, record.row_of_TK, len(record.token_of_row_R), zeros=record.drops
            ),
        )
    )
    assert torch.equal(found, drawn.x_TD[record.token_of_row_R] * drawn.owned_R[:, None])


def check_sums(drawn: Rows) -> None:
    """Bit for bit what torch adds up, weighted or not, in fp32 or rounded once; a row that
    nobody owns is not read.
    """
    record = drawn.record
    rows_RD = spoiled(
        torch.randn(len(record.token_of_row_R), drawn.x_TD.shape[1], **FACTS).to(drawn.x_TD.dtype),
        drawn,
    )
    for weights_TK in (None, drawn.probs_TK):
        for dtype in (torch.float32, drawn.x_TD.dtype):
            places = rows_RD, record.row_of_TK, weights_TK
            (found,) = twice(lambda places=places, dtype=dtype: (rows.sum_rows(*places, dtype),))
            assert_same(found, sum_rows(*places, record.drops, dtype))


def check_gradients(drawn: Rows) -> None:
    """Gradients of the rows to the bit; dot products to the rounding of sums of D terms in
    another order.
    """
    record = drawn.record
    rows_RD = spoiled(
        torch.randn(len(record.token_of_row_R), drawn.x_TD.shape[1], **FACTS).to(drawn.x_TD.dtype),
        drawn,
    )
    places = record.row_of_TK, record.drops
    grad_RD, dots_TK = twice(
        lambda: rows.combine_gradients(drawn.x_TD, rows_RD, drawn.probs_TK, *places)
    )
    wanted_RD, wanted_TK = combine_gradients(drawn.x_TD, rows_RD, drawn.probs_TK, *places)
    assert_same(grad_RD[drawn.owned_R], wanted_RD[drawn.owned_R])
    assert grad_RD[~drawn.owned_R].eq(0).all()
    wide = (value.double() for value in (drawn.x_TD, rows_RD, drawn.probs_TK))
    with in_fp64():
        _, exact_TK = combine_gradients(*wide, *places)
    expect_alike({"dots": dots_TK}, {"dots": wanted_TK}, {"dots": exact_TK})
    assert dots_TK[record.row_of_TK >= len(rows_RD)].eq(0).all()


def spoiled(rows_RD: Tensor, drawn: Rows) -> Tensor:
    """The rows, not a number where nobody reads."""
    return rows_RD.masked_fill(~drawn.owned_R[:, None], float("nan"))


def check_grouped_gradient(
    counts: list[int],
    width: int,
    columns: int,
    dtype: torch.dtype,
    spare: int,
    first: int = 0,
    adds: bool = True,
    fills: bool = False,
) -> None:
    """Within the rounding of sums; nothing else is touched, and rows that nobody owns do not count,
    nor do those of the experts before the first, and what is not added to. With `fills` all is
    written.

    fp32 sums of n products of normals, of size √n, are rounded at each of them. Tensor cores cut
    digits off instead, every 16 rows and always towards zero: n/16 · √n · 2⁻²⁴ on average, twice
    that is allowed.
    """
    torch.manual_seed(5)
    total, used = sum(counts) + spare, sum(counts)
    rows_TI, grad_TO = (torch.randn(total, wide, **FACTS).to(dtype) for wide in (width, columns))
    rows_TI[used:], grad_TO[used:] = float("nan"), float("nan")
    before_EIO = torch.randn(len(counts) - first, width, columns, **FACTS)
    ends_E = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    rows_TI[: sum(counts[:first])] = float("nan")
    replaced_E = torch.tensor(
        [(count > 0 or fills) and not adds for count in counts[first:]], device=DEVICE
    )
    before_EIO[replaced_E] = float("nan")

    def run() -> tuple[Tensor]:
        sums_EIO = before_EIO.clone()
        add_grouped_gradient(
            sums_EIO, rows_TI, grad_TO, ends_E=ends_E, first=first, adds=adds, fills=fills
        )
        return (sums_EIO,)

    (found,) = twice(run)
    base_EIO = before_EIO.masked_fill(replaced_E[:, None, None], 0)
    owned = zip(
        rows_TI[:used].double().split(counts), grad_TO[:used].double().split(counts), strict=True
    )
    for expert, (mine_TI, grads_TO) in enumerate(list(owned)[first:]):
        count = counts[first + expert]
        wanted_IO = base_EIO[expert] + mine_TI.T @ grads_TO
        rounding = 2e-6 * (1 + count) ** 0.5 + 2.0**-27 * count**1.5
        torch.testing.assert_close(found[expert].double(), wanted_IO, rtol=1e-5, atol=rounding)
        assert count or torch.equal(found[expert], base_EIO[expert])


def check_top_experts(
    tokens: int, experts: int, top_k: int, dtype: torch.dtype = torch.float32
) -> None:
    """Check top-k against a stable sort of scores: among equal ones the lowest ids.

    Rounded scores have many ties.
    """
    torch.manual_seed(3)
    scores_TE = torch.randn(tokens, experts, **FACTS).to(dtype)
    for scores in (
        scores_TE,
        (scores_TE * 2).round(),
        scores_TE.masked_fill(scores_TE.abs() > 0.5, float("-inf")),
    ):
        (found,) = twice(lambda scores=scores: (top_experts(scores, top_k),))
        wanted = (
            scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k].sort(dim=1).values
        )
        assert found.dtype == torch.int64 and torch.equal(found, wanted)
