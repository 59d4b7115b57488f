"""Send and receive between pipeline ranks: exchanges added to the compute lists of all ranks.

One simulated clock timestamps each output. Sender and receiver each insert its Exchange after all
their actions that have ended by then. So all lists are ordered by one clock, and both sides of
every edge agree on the order. Even if every exchange blocked until its other sides arrived, none
could wait for one that waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from app.plan.actions import Action, Backward, Compute, Exchange, Flow, Forward, Free, P2POp, Wait
from app.plan.dependencies import Made, Pipeline, expect_finished, pipeline_of
from app.plan.pipeline.timeline import EndTimes, Times, compute_end_times

# Times of the overlapped lists. A nonzero send time puts the receive before the receiver's
# concurrent action, so that the tensor moves during that action. With zero the receive would follow
# the action, and the next one would wait for the whole transfer.
# In a V a microbatch comes back to a rank after a few actions: lists made for slow sends lose up to
# 6 % there if sends are fast.
OVERLAP_TIMES = Times(forward=1.0, backward=2.0, send=0.25)
OVERLAP_TIMES_IN_V = Times(forward=1.0, backward=2.0, send=0.0625)


def add_exchanges(
    lists: Sequence[Sequence[Compute]], overlap: bool, v_shape: bool = False
) -> list[list[Action]]:
    """Add sends, receives and the waits for them to each rank's compute actions, lists[rank].

    overlap: post an exchange as soon as its tensors are ready and wait where they are needed;
    otherwise wait at once. v_shape: see Pipeline. Raises ValueError if the lists wait for each
    other in a circle.
    """
    pipeline = pipeline_of(lists, v_shape)
    times = OVERLAP_TIMES_IN_V if v_shape else OVERLAP_TIMES
    end_times = (
        compute_end_times(lists, v_shape, times) if overlap else tick_end_times(lists, pipeline)
    )
    exchanges = _exchanges(end_times, pipeline)
    merged = [
        _merge(
            actions,
            exchanges[rank],
            [end_times[pipeline.makes(rank, action)] for action in actions],
        )
        for rank, actions in enumerate(lists)
    ]
    return [add_late_waits(actions) if overlap else add_waits(actions) for actions in merged]


def tick_end_times(lists: Sequence[Sequence[Compute]], pipeline: Pipeline) -> dict[Made, float]:
    """Return the tick of every output if each rank runs at most one action per tick.

    With several chunks, a forward and the full backward after it share a tick if both are ready, so
    that all ranks meet once per pair. With a tick each, a forward on one rank would meet a backward
    on the other, and the longer one would decide: 16 to 22 % of the step if a backward takes twice
    the time of a forward.
    """
    places = [0] * pipeline.pp
    end_times = dict[Made, float]()
    tick = 0
    while True:
        made = dict[Made, float]()
        for rank, actions in enumerate(lists):
            following = actions[places[rank] : places[rank] + 2]
            ready = _ready(rank, following, end_times, pipeline=pipeline)
            made.update((action, tick) for action in ready)
            places[rank] += len(ready)
        if not made:
            break
        end_times.update(made)
        tick += 1
    expect_finished(lists, places)
    return end_times


def _ready(
    rank: int, actions: Sequence[Compute], end_times: EndTimes, pipeline: Pipeline
) -> list[Made]:
    """Return a rank's tick: its next action if it can run, and a full backward after a forward."""
    made: list[Made] = []
    for action in actions:
        paired = (
            pipeline.num_chunks > 1
            and isinstance(actions[0], Forward)
            and isinstance(action, Backward)
        )
        if made and not paired:
            break
        if not all(need in end_times or need in made for need in pipeline.needs(rank, action)):
            break
        made.append(pipeline.makes(rank, action))
    return made


def _exchanges(end_times: EndTimes, pipeline: Pipeline) -> list[list[tuple[float, Exchange]]]:
    """Return, per rank and time, its sends and receives.

    Hidden states first, then by microbatch.
    """
    ops: list[defaultdict[float, list[P2POp]]] = [defaultdict(list) for _ in range(pipeline.pp)]
    for made in sorted(end_times, key=lambda made: (made[0] != "F", made)):
        for rank, op in pipeline.sides(made):
            ops[rank][end_times[made]].append(op)
    return [
        [(time, Exchange(tuple(together))) for time, together in sorted(by_time.items())]
        for by_time in ops
    ]


def _merge(
    actions: Sequence[Compute], exchanges: Sequence[tuple[float, Exchange]], ends: Sequence[float]
) -> list[Action]:
    """Insert every exchange after the actions that have ended by its time."""
    timed: list[tuple[float, int, Action]] = [
        (end, 0, action) for end, action in zip(ends, actions, strict=True)
    ]
    timed += [(time, 1, exchange) for time, exchange in exchanges]
    return [action for _, _, action in sorted(timed, key=lambda entry: entry[:2])]


def add_waits(actions: Sequence[Action]) -> list[Action]:
    """Insert a Wait right after every Exchange."""
    lowered: list[Action] = []
    for action in actions:
        lowered += [action, Wait(action.ops)] if isinstance(action, Exchange) else [action]
    return lowered


def add_late_waits(actions: Sequence[Action]) -> list[Action]:
    """Insert waits as late as they may stand.

    Receives: before the action that needs the tensor. Sends: before the second compute action after
    the post (the tensor's memory is written again no earlier), before the backward of the same
    microbatch, which ends the life of the forward's output, and at the end of the list.
    """
    lowered: list[Action] = []
    sends: dict[P2POp, int] = {}  # in flight -> compute actions before them
    # receives in flight, by what needs them: flow, microbatch, chunk
    receives: dict[tuple[Flow, int, int], P2POp] = {}
    computed = 0
    for action in actions:
        if isinstance(action, Exchange):
            sends.update((op, computed) for op in action.ops if op.send)
            receives.update((op[:3], op) for op in action.ops if not op.send)
        elif isinstance(action, Compute):
            due = [
                op
                for op, since in sends.items()
                if since < computed or op[:3] == ("F", action.mb, action.chunk)
            ]
            for op in due:
                del sends[op]
            flow: Flow = "F" if isinstance(action, Forward) else "B"
            needed = receives.pop((flow, action.mb, action.chunk), None)
            due += [] if needed is None else [needed]
            lowered += [Wait(tuple(due))] if due else []
            computed += 1
        lowered.append(action)
    left = *sends, *receives.values()
    return [*lowered, Wait(left)] if left else lowered


def add_frees(actions: Sequence[Action]) -> list[Action]:
    """Free every forward's output right after the Wait for its send."""
    lowered: list[Action] = []
    for action in actions:
        lowered.append(action)
        if isinstance(action, Wait):
            lowered += [Free(op.mb, op.chunk) for op in action.ops if op.send and op.flow == "F"]
    return lowered
