"""ZB-V: split backward, two chunks per rank in a V, no idle rank while microbatches flow.

A microbatch goes down the ranks through their chunks 0 and back up through their chunks 1, so rank
0 holds its loss and starts its backward without a send (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism"; the V and its constant memory: Qi et al. 2024, "Pipeline Parallelism with Controllable
Memory"). Orders are (letter, microbatch, chunk), as actions print: F forward, I gradient of the
input, W gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

Step = tuple[str, int, int]  # letter, microbatch, chunk


def zero_bubble_v(pp: int, num_microbatches: int) -> list[list[Step]]:
    """Return the compute actions of every rank, in order; result[rank].

    All ranks are simulated on one clock, on which F, I and W each take a tick. A rank runs the
    first action that is ready: an F before an I before a W, and each alternating between the
    chunks. At most 2·pp of its chunk-microbatches are in flight, from F to W: the memory of pp full
    microbatches, 1F1B's peak. So every rank settles into F F I I W W, one of each chunk. With other
    ratios of their times the bubble grows, but not with the number of microbatches.

    The last of the 2·pp places is reserved for chunk 1. Otherwise forwards of chunk 0 could fill
    them all with microbatches whose backward cannot start. So the oldest microbatch can always
    continue, and no order gets stuck.

    On that clock a step of at least 2·pp microbatches on up to 16 ranks takes 6·num_microbatches +
    pp − 1 ticks, the least possible: the last rank starts after pp − 1. In the same ticks ZB-H1's
    bubble is 2·(pp − 1) and 1F1B's 6·(pp − 1).
    """
    clock = _Clock(pp, num_microbatches)
    orders: list[list[Step]] = [[] for _ in range(pp)]
    while any(len(order) < 6 * num_microbatches for order in orders):
        # what all ranks can run, before any of them runs it
        ready = [list(clock.ready(rank)) for rank in range(pp)]
        assert any(ready), "stuck"
        for rank, steps in enumerate(ready):
            if steps:
                orders[rank].append(steps[0])
                clock.run(rank, steps[0])
    return orders


class _Clock:
    """Progress of every stage in microbatches, which pass each stage in order."""

    def __init__(self, pp: int, num_microbatches: int) -> None:
        self.stages = [(rank, 2 * pp - 1 - rank) for rank in range(pp)]  # [rank][chunk]
        self.last = 2 * pp - 1
        self.total = num_microbatches
        self.done = {letter: [0] * 2 * pp for letter in "FIW"}  # [stage]: microbatches
        # [rank]: chunk that is tried first
        self.turns = [dict.fromkeys("FIW", 1) for _ in range(pp)]

    def ready(self, rank: int) -> Iterator[Step]:
        """Yield the actions that the rank can run now, in order of preference."""
        for letter, turn in self.turns[rank].items():
            for chunk in (turn, 1 - turn):
                mb = self.done[letter][self.stages[rank][chunk]]
                if mb < self._arrived(letter, rank, chunk):
                    yield letter, mb, chunk

    def _arrived(self, letter: str, rank: int, chunk: int) -> int:
        """Return how many microbatches the rank could have run by now."""
        forwards, inputs, weights = self.done.values()
        stage = self.stages[rank][chunk]
        if letter == "W":
            return inputs[stage]
        if letter == "I":
            return inputs[stage + 1] if stage < self.last else forwards[stage]
        in_flight = sum(forwards[stage] - weights[stage] for stage in self.stages[rank])
        if in_flight >= self.last + chunk:
            return 0
        return forwards[stage - 1] if stage else self.total

    def run(self, rank: int, step: Step) -> None:
        """Record that the rank has run a step."""
        letter, _, chunk = step
        self.done[letter][self.stages[rank][chunk]] += 1
        self.turns[rank][letter] = 1 - chunk
