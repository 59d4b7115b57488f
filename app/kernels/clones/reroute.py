"""Counts of a rank's choices for the clone plan, and the choices' destinations (`app.moe.echo`).

Counts by blocks of tokens (`app.kernels.expert_rows`) are added up by the kernel that sends them. A
token's position among its expert's tokens is computed only for experts with clones.

Shapes: T tokens of this rank, K experts of each · E experts · R ranks · S slots · C blocks of B
tokens. In kernels E and S are powers of two that hold these, CHUNK blocks are added up and CHOICES
choices processed together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.clones.meeting import Arrivals, meet_one
from app.kernels.common import jit, tl
from app.kernels.expert_rows import block_sizes, chosen_of_block, sums_of_blocks
from app.kernels.tiling import block_of

PAIRS = 4096  # (choice, slot) pairs processed together
COUNTS = 8192  # added up at once


def all_gather_counts(counts_CE: Tensor, addresses_R: Tensor, arrivals: Arrivals) -> None:
    """Write the sums of the blocks' counts, int64 [E], to each of the addresses, and wait for all
    ranks'.
    """
    blocks, experts = counts_CE.shape
    _all_gather_counts[(len(addresses_R),)](
        counts_CE,
        addresses_R,
        arrivals.own_P,
        arrivals.addresses_P,
        arrivals.passed_P,
        blocks,
        experts=experts,
        CHUNK=min(block_of(blocks), max(1, COUNTS // block_of(experts))),
        E=block_of(experts),
        num_warps=16,
    )


def reroute(
    experts_TK: Tensor,
    counts_CE: Tensor,
    expert_S: Tensor,
    moved_S: Tensor,
    moved_R_S: Tensor,
    ranks: int,
) -> Tensor:
    """Return the destination of each choice, int64 [T, K], ids as in `app.moe.echo.reroute`.

    `counts_CE` are those of `app.kernels.expert_rows.count_choices` for all experts; `moved_R_S` is
    the number of tokens that move from the rank of these counts to each slot.
    """
    tokens, top_k = experts_TK.shape
    (blocks, experts), slots = counts_CE.shape, len(expert_S)
    sizes = block_sizes(tokens, experts, blocks)
    choices = sizes["B"] * top_k
    all_TK = torch.empty(experts_TK.shape, dtype=torch.int64, device=experts_TK.device)
    _reroute[(blocks,)](
        experts_TK.contiguous(),
        counts_CE,
        torch.empty(experts_TK.shape, dtype=torch.int32, device=experts_TK.device),
        expert_S,
        moved_S,
        moved_R_S,
        all_TK,
        tokens,
        blocks,
        experts=experts,
        slots=slots,
        local=experts // ranks,
        spares=slots // ranks,
        K=top_k,
        CHOICES=min(block_of(choices), max(1, PAIRS // block_of(slots))),
        S=block_of(slots),
        **sizes,
    )
    return all_TK


@jit
def _all_gather_counts(
    counts: tl.tensor,
    addresses: tl.tensor,
    arrived: tl.tensor,
    told: tl.tensor,
    passed: tl.tensor,
    blocks: int,
    experts: tl.constexpr,
    CHUNK: tl.constexpr,
    E: tl.constexpr,
) -> None:
    other = tl.program_id(0)
    expert = tl.arange(0, E)
    total = tl.zeros((CHUNK, E), tl.int64)
    for start in range(0, blocks, CHUNK):
        block = (start + tl.arange(0, CHUNK))[:, None]
        there = (block < blocks) & (expert < experts)[None, :]
        total += tl.load(counts + block * experts + expert[None, :], mask=there, other=0)
    out = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
    tl.store(out + expert, tl.sum(total, axis=0), mask=expert < experts)
    meet_one(other, arrived, told, passed)


@jit
def _reroute(
    chosen: tl.tensor,
    counts: tl.tensor,
    places: tl.tensor,
    suppliers: tl.tensor,
    moved_of_slot: tl.tensor,
    moved_from_here: tl.tensor,
    found: tl.tensor,
    tokens: int,
    blocks: int,
    experts: tl.constexpr,
    slots: tl.constexpr,
    local: tl.constexpr,
    spares: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    S: tl.constexpr,
    CHUNK: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
) -> None:
    first = tl.program_id(0) * B
    slot = tl.arange(0, S)
    inside = slot < slots
    filled = tl.load(moved_of_slot + slot, mask=inside, other=0) > 0
    moves = tl.max(filled.to(tl.int32), axis=0) > 0
    if moves:  # position of each choice among those of its expert
        _, before = sums_of_blocks(counts, blocks, begin=0, local=experts, CHUNK=CHUNK, E=E)
        own = chosen_of_block(chosen, tokens, 0, local=experts, K=K, B=B, E=E)
        place = before[:, None] + tl.cumsum((own > 0).to(tl.int32), axis=1) - 1
        at = (first + tl.arange(0, B))[None, :] * K + own - 1
        tl.store(places + at, place, mask=own > 0)
        tl.debug_barrier()
    for start in range(0, B * K, CHOICES):
        nth_here = start + tl.arange(0, CHOICES)
        choice = first * K + nth_here
        real = (nth_here < B * K) & (choice < tokens * K)
        expert = tl.load(chosen + choice, mask=real, other=experts).to(tl.int64)
        known = real & (expert < experts)
        goes = expert // local * (local + spares) + expert % local
        if moves:
            place = tl.load(places + choice, mask=known, other=0)
            supplier = tl.load(suppliers + slot, mask=inside, other=0)
            cloned = (supplier[None, :] == expert[:, None]) & filled[None, :]
            taken = tl.load(moved_from_here + slot, mask=inside, other=0)
            end = tl.cumsum(tl.where(cloned, taken[None, :], 0), axis=1)
            nth = tl.sum(((end <= place[:, None]) & inside[None, :]).to(tl.int64), axis=1)
            clone = nth // spares * (local + spares) + local + nth % spares
            goes = tl.where(nth < slots, clone, goes)
        goes = tl.where(known, goes, experts // local * (local + spares))
        tl.store(found + choice, goes, mask=real)
