"""Pipeline schedules: compute actions of each pipeline rank within a step, as printable lists.

Rank r of `pp` ranks holds `num_chunks` chunks. Chunk c of rank r is stage c·pp + r, or, in
`v_shaped` schedules, chunk 1 of rank r is stage 2·pp − 1 − r. A microbatch passes all stages
forward, then all of them backward. Lists hold compute only; `lowering` adds communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from app.plan.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from app.plan.zero_bubble import zero_bubble_v

SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v")


def build_schedule(
    name: str,
    pp: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    forward_only: bool = False,
) -> list[list[Compute]]:
    """Return the compute actions of every pipeline rank, in order; result[rank].

    name: "none"            one rank, forward and backward in turn: F0 B0 F1 B1 …
          "gpipe"           all forwards, then all backwards (Huang et al. 2019)
          "1f1b"            pp − rank − 1 forwards, then one forward and one backward in turn
                            (PipeDream-Flush, Narayanan et al. 2021a): at most pp − rank
                            microbatches in flight
          "interleaved"     the same over num_chunks chunks per rank, `group_size` microbatches
                            (None: pp) at a time through each chunk (Narayanan et al. 2021b): the
                            bubble's time divided by num_chunks
          "zero_bubble_h1"  1F1B with split backward; weight gradients fill part of the bubble (Qi
                            et al. 2023)
          "zero_bubble_v"   split backward, two chunks per rank in a V (see `zero_bubble`): half the
                            bubble of zero_bubble_h1 if F, I and W take equally long
    forward_only: forwards alone (validation), in the same order; in a V, in an order in which no
                  rank waits for another. Takes any num_microbatches, and rounds group_size to the
                  nearest legal value

    Raises ValueError for an unknown name, chunks or groups that a schedule does not have, and for
    interleaved with backwards if num_microbatches or group_size is below pp, group_size above
    num_microbatches, or the last group non-empty and below pp: a microbatch would then wait for its
    own previous chunk.
    """
    if forward_only:
        _check_choice(name, pp, num_microbatches, num_chunks=num_chunks, group_size=group_size)
        wanted = pp if group_size is None else group_size
        return _forwards(name, pp, num_microbatches, num_chunks=num_chunks, group=wanted)
    check_schedule(name, pp, num_microbatches, num_chunks=num_chunks, group_size=group_size)
    if v_shaped(name):
        return _zero_bubble_v(pp, num_microbatches)
    group = pp if group_size is None else group_size
    order = chunk_order(num_microbatches, num_chunks, group)
    forwards = [Forward(mb, chunk) for mb, chunk in order]
    backwards = [Backward(mb, num_chunks - 1 - chunk) for mb, chunk in order]
    match name:
        case "zero_bubble_h1":
            return [_zero_bubble_h1(pp, rank, num_microbatches) for rank in range(pp)]
        case "interleaved":
            warmups = [
                warmup_count(pp, rank, num_microbatches, num_chunks=num_chunks, group_size=group)
                for rank in range(pp)
            ]
        case "gpipe":
            warmups = [num_microbatches] * pp
        case _:
            warmups = [warmup_count(pp, rank, num_microbatches) for rank in range(pp)]
    return [_weave(forwards, backwards, warmup) for warmup in warmups]


def v_shaped(name: str) -> bool:
    """Return whether the schedule's chunks lie in a V.

    Users of its lists then pass v_shape=True.
    """
    return name == "zero_bubble_v"


def check_schedule(
    name: str, pp: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
) -> None:
    """Raise ValueError, with the nearest legal value, for what build_schedule refuses."""
    _check_choice(name, pp, num_microbatches, num_chunks=num_chunks, group_size=group_size)
    if name == "interleaved":
        _check_groups(pp, num_microbatches, pp if group_size is None else group_size)


def _check_choice(
    name: str, pp: int, num_microbatches: int, num_chunks: int, group_size: int | None
) -> None:
    """Raise ValueError for what neither training nor forward-only can run."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; there are {', '.join(SCHEDULES)}")
    if min(pp, num_microbatches, num_chunks) < 1:
        raise ValueError(
            f"pp={pp}, num_microbatches={num_microbatches} and num_chunks={num_chunks} must "
            "be at least 1"
        )
    if name == "none" and pp > 1:
        raise ValueError(
            f"schedule none runs on one pipeline rank, not on pp={pp}; use 1f1b or interleaved"
        )
    if name == "interleaved":
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size={group_size} must be at least 1")
    elif v_shaped(name):
        if num_chunks != 2 or group_size is not None:
            raise ValueError(
                f"schedule {name} has two chunks per rank and no groups, not "
                f"num_chunks={num_chunks} and "
                f"group_size={group_size}; use 2 and None"
            )
    elif num_chunks > 1 or group_size is not None:
        raise ValueError(
            f"schedule {name} has one chunk per rank and no groups, not "
            f"num_chunks={num_chunks} and "
            f"group_size={group_size}; use interleaved"
        )


def _check_groups(pp: int, num_microbatches: int, group: int) -> None:
    if pp < 2:
        raise ValueError("schedule interleaved needs at least 2 pipeline ranks, not pp=1; use none")
    if num_microbatches < pp:
        raise ValueError(
            f"schedule interleaved needs num_microbatches >= pp, not {num_microbatches} < "
            f"{pp}; use {pp} or more"
        )
    legal = _legal_groups(pp, num_microbatches)
    if group in legal:
        return
    if pp <= group <= num_microbatches:
        reason = (
            f"leaves num_microbatches={num_microbatches} a last group of "
            f"{num_microbatches % group}, below pp={pp}"
        )
    else:
        reason = f"must be between pp={pp} and num_microbatches={num_microbatches}"
    raise ValueError(f"group_size={group} {reason}; nearest that works: {_nearest(legal, group)}")


def _legal_groups(pp: int, num_microbatches: int) -> list[int]:
    """Return the group sizes with which no microbatch waits for its own previous chunk.

    Maybe none.
    """
    sizes = range(pp, num_microbatches + 1)
    return [size for size in sizes if not 0 < num_microbatches % size < pp]


def _nearest(sizes: Sequence[int], wanted: int) -> int:
    return min(sizes, key=lambda size: abs(size - wanted))


def warmup_count(
    pp: int,
    pp_rank: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    forward_only: bool = False,
    moe_overlap: bool = False,
) -> int:
    """Return the forwards that `pp_rank` runs before its first backward.

    1F1B: min(M, pp − rank − 1). Interleaved (num_chunks > 1 or a group_size): min(M·chunks, 2·(pp −
    rank − 1) + (chunks − 1)·group). moe_overlap adds one, so that the forward and the backward of a
    pair are of different microbatches; for programs that overlap these, which this one does not.
    forward_only: all M·chunks. Without pipeline ranks: none.
    """
    total = num_microbatches * num_chunks
    if forward_only:
        return total
    if pp == 1:
        return 0
    if num_chunks == 1 and group_size is None:
        return min(total, pp - pp_rank - 1)
    group = pp if group_size is None else group_size
    return min(total, 2 * (pp - pp_rank - 1) + (num_chunks - 1) * group + moe_overlap)


def chunk_order(num_microbatches: int, num_chunks: int, group: int) -> list[tuple[int, int]]:
    """Return (mb, chunk) in order of forwards: each group of microbatches passes chunk 0, 1, …."""
    starts = range(0, num_microbatches, group)
    groups = [range(start, min(start + group, num_microbatches)) for start in starts]
    return [(mb, chunk) for mbs in groups for chunk in range(num_chunks) for mb in mbs]


def _weave(forwards: Sequence[Compute], backwards: Sequence[Compute], warmup: int) -> list[Compute]:
    """Return warm-up forwards, then forward and backward in turn, then the remaining backwards."""
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return [
        *forwards[:warmup],
        *(action for pair in pairs for action in pair),
        *backwards[len(forwards) - warmup :],
    ]


def _zero_bubble_h1(pp: int, rank: int, num_microbatches: int) -> list[Compute]:
    """Return ZB-H1 (Qi et al. 2023): 1F1B with each weight gradient delayed by `rank` microbatches.

    Delayed weight gradients and microbatches in flight add up to pp on every rank, which is 1F1B's
    peak on its first rank. The bubble shrinks from (pp − 1)(F + I + W) to (pp − 1)(F + I − W), in
    times of the three parts.
    """
    mbs = range(num_microbatches)
    woven = _weave(
        [Forward(mb, 0) for mb in mbs],
        [BackwardInput(mb, 0) for mb in mbs],
        warmup_count(pp, rank, num_microbatches),
    )
    actions: list[Compute] = []
    for action in woven:
        actions.append(action)
        if isinstance(action, BackwardInput) and action.mb >= rank:
            actions.append(BackwardWeight(action.mb - rank, 0))
    return actions + [BackwardWeight(mb, 0) for mb in mbs[max(0, num_microbatches - rank) :]]


def _forwards(
    name: str, pp: int, num_microbatches: int, num_chunks: int, group: int
) -> list[list[Compute]]:
    """Return forwards alone; fewer microbatches than ranks pass each chunk as one group."""
    if v_shaped(name):
        return _forwards_in_v(pp, num_microbatches)
    group = _nearest(_legal_groups(pp, num_microbatches) or [num_microbatches], group)
    order = chunk_order(num_microbatches, num_chunks, group)
    return [[Forward(mb, chunk) for mb, chunk in order] for _ in range(pp)]


def _forwards_in_v(pp: int, num_microbatches: int) -> list[list[Compute]]:
    """Return forwards of chunk 0 until the first one of chunk 1 arrives, then both in turn."""
    out, back = ([Forward(mb, chunk) for mb in range(num_microbatches)] for chunk in (0, 1))
    return [_weave(out, back, min(num_microbatches, 2 * (pp - rank - 1))) for rank in range(pp)]


def _zero_bubble_v(pp: int, num_microbatches: int) -> list[list[Compute]]:
    kinds: dict[str, type[Compute]] = {"F": Forward, "I": BackwardInput, "W": BackwardWeight}
    return [
        [kinds[letter](mb, chunk) for letter, mb, chunk in order]
        for order in zero_bubble_v(pp, num_microbatches)
    ]


def signed_order(actions: Iterable[object]) -> list[int]:
    """Return the list as signed numbers: +(chunk + 1) for a forward, −(chunk + 1) for a backward.

    A split backward counts at its BackwardInput; BackwardWeight and other actions are left out. For
    other programs, and for tests that compare lists with theirs.
    """
    signs: list[int] = []
    for action in actions:
        match action:
            case Forward():
                signs.append(action.chunk + 1)
            case Backward() | BackwardInput():
                signs.append(-action.chunk - 1)
    return signs


def peak_in_flight(actions: Iterable[object]) -> int:
    """Return the most microbatches in flight, counted per chunk, from forward to backward.

    A split backward ends with its BackwardWeight. Without backwards nothing is saved, and the peak
    is 1, the microbatch that runs.
    """
    listed = list(actions)
    splits = any(isinstance(action, BackwardWeight) for action in listed)
    ends = BackwardWeight if splits else Backward
    if not any(isinstance(action, ends) for action in listed):
        return int(any(isinstance(action, Forward) for action in listed))
    return max(
        accumulate(isinstance(action, Forward) - isinstance(action, ends) for action in listed)
    )


def last_backwards(actions: Sequence[object]) -> frozenset[int]:
    """Return positions of each chunk's last backward, which completes its gradients.

    None if split.
    """
    if any(isinstance(action, BackwardWeight) for action in actions):
        return frozenset()
    return frozenset(
        {
            action.chunk: position
            for position, action in enumerate(actions)
            if isinstance(action, Backward)
        }.values()
    )
