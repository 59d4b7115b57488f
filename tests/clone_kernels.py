"""Kernels of clones against loops, at any size, on any device that runs them; the memory of the
ranks is as many tensors here.

Shapes: R ranks, s slots of each, S of all, L experts of each, E of all, I × O a matrix, T rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.kernels.clones.weights import Slots, add_clones, push_clones
from app.kernels.grouped_gemm import grouped_gemm
from tests.moe_kernels import DEVICE, FACTS, assert_same, twice
from tests.peer_kernels import UNTOUCHED, memory


def check_grouped_gemm(
    counts: list[int],
    first: int,
    width: int,
    columns: int,
    dtype: torch.dtype,
    transposed: bool = False,
    spare: int = 3,
) -> None:
    """Groups from `first` on, within the rounding of sums; other rows are neither read nor written,
    nor are matrices of groups without rows.

    Each of n additions to a sum cuts off less than 2⁻²³ of it, the cast one step of the type.
    """
    torch.manual_seed(7)
    ends, groups = torch.tensor(counts).cumsum(0).tolist(), len(counts) - first
    parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)][first:]
    rows_TI = torch.randn(ends[-1] + spare, width, **FACTS).to(dtype)
    weight_GIO = torch.randn(groups, width, columns, **FACTS).to(dtype)
    rows_TI[: parts[0].start] = rows_TI[ends[-1] :] = float("nan")
    weight_GIO[torch.tensor(counts[first:]) == 0] = float("nan")
    ends_E = torch.tensor(ends, device=DEVICE).int()
    before_TO = torch.full((len(rows_TI), columns), UNTOUCHED, dtype=dtype, device=DEVICE)
    given_GIO = weight_GIO.mT.contiguous() if transposed else weight_GIO

    def run() -> tuple[Tensor]:
        out_TO = before_TO.clone()
        grouped_gemm(out_TO, rows_TI, given_GIO, ends_E, first=first, transposed=transposed)
        return (out_TO,)

    (found_TO,) = twice(run)
    assert (
        found_TO[: parts[0].start].eq(UNTOUCHED).all() and found_TO[ends[-1] :].eq(UNTOUCHED).all()
    )
    for group, part in enumerate(parts):
        rows, matrix = rows_TI[part].double(), weight_GIO[group].double()
        wanted, size = rows @ matrix, rows.abs() @ matrix.abs()
        bound = width * 2.0**-23 * size + torch.finfo(dtype).eps * wanted.abs()
        assert ((found_TO[part].double() - wanted).abs() <= bound).all(), group


@dataclass(frozen=True)
class DrawnClones:
    """Which slots have which expert, and what lies there."""

    ranks: int
    local: int
    expert_S: Tensor  # any number, of no expert too, where a slot is empty
    filled_S: Tensor
    weight_EIO: Tensor
    grads_SIO: Tensor  # fp32; not a number where a slot is empty

    @property
    def moved_S(self) -> Tensor:
        """Tokens that go to a slot."""
        return 3 * self.filled_S.long()

    def slots_of(self, expert: int) -> list[int]:
        """Return the slots with a clone of the expert, in order."""
        return (self.filled_S & (self.expert_S == expert)).nonzero().flatten().tolist()

    def of_rank(self, values_E: Tensor, rank: int) -> Tensor:
        """Return a copy of the values of a rank's experts."""
        return values_E[rank * self.local : (rank + 1) * self.local].clone()


def draw_clones(
    ranks: int,
    spares: int,
    local: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    seed: int = 0,
    full: float = 2 / 3,
) -> DrawnClones:
    """So large a share of the slots is filled, the last one always; an empty one before it says
    that it has the same expert. Experts have several clones where there are few.
    """
    torch.manual_seed(seed)
    slots, experts = ranks * spares, ranks * local
    expert_S = torch.randint(0, experts, (slots,), device=DEVICE)
    filled_S = torch.rand(slots, device=DEVICE) < full
    filled_S[0], filled_S[-1] = full == 1, full > 0
    anything_S = torch.randint(-2, experts + 3, (slots,), device=DEVICE)
    expert_S = torch.where(filled_S, expert_S, anything_S)
    expert_S[0] = expert_S[-1]
    grads_SIO = torch.randn(slots, *shape, **FACTS)
    grads_SIO[~filled_S] = float("nan")
    weight_EIO = torch.randn(experts, *shape, **FACTS).to(dtype)
    return DrawnClones(ranks, local, expert_S, filled_S, weight_EIO, grads_SIO)


def check_push_clones(drawn: DrawnClones) -> None:
    """Every filled slot has its expert's matrices of both kinds; nothing is written to others."""
    kinds = drawn.weight_EIO, -2 * drawn.weight_EIO[:, :, :2].contiguous()
    memories, wanted = [], []
    for weight_EIO in kinds:
        shape = len(drawn.expert_S), *weight_EIO.shape[1:]
        untouched_SIO = weight_EIO.new_full(shape, UNTOUCHED)
        memories.append(memory(untouched_SIO, drawn.ranks))
        wanted.append(untouched_SIO.clone())
        for slot, expert in enumerate(drawn.expert_S.tolist()):
            if drawn.filled_S[slot]:
                wanted[-1][slot] = weight_EIO[expert]
    for rank in range(drawn.ranks):
        up, down = (
            Slots(drawn.of_rank(weight_EIO, rank), addresses_R)
            for weight_EIO, (_, addresses_R) in zip(kinds, memories, strict=True)
        )
        push_clones(up, down, drawn.expert_S, drawn.moved_S, first=rank * drawn.local)
    for (parts, _), wanted_SIO in zip(memories, wanted, strict=True):
        assert torch.equal(torch.cat(parts), wanted_SIO)


def check_add_clones(drawn: DrawnClones, dtype: torch.dtype = torch.float32) -> None:
    """Bit for bit what a loop over slots adds; experts without a clone keep their sums."""
    total_EIO = torch.randn(drawn.weight_EIO.shape, **FACTS).to(dtype)
    _parts, addresses_R = memory(drawn.grads_SIO, drawn.ranks)
    for rank in range(drawn.ranks):
        first = rank * drawn.local
        before_LIO = drawn.of_rank(total_EIO, rank)

        def run(before_LIO: Tensor = before_LIO, first: int = first) -> tuple[Tensor]:
            total_LIO = before_LIO.clone()
            add_clones(total_LIO, drawn.expert_S, drawn.moved_S, addresses_R, first=first)
            return (total_LIO,)

        (found_LIO,) = twice(run)
        for nth in range(drawn.local):
            wanted_IO = before_LIO[nth].float()
            for slot in drawn.slots_of(first + nth):
                wanted_IO = wanted_IO + drawn.grads_SIO[slot]
            assert_same(found_LIO[nth], wanted_IO.to(dtype))
