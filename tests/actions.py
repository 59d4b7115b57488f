"""Actions from the words that they print as."""

from __future__ import annotations

import re

from app.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Flow,
    Forward,
    Free,
    GatherParams,
    P2POp,
    ReduceGrads,
    Wait,
)

ON_MICROBATCH = {
    kind.letter: kind for kind in (Forward, Backward, BackwardInput, BackwardWeight, Free)
}


ON_CHUNK = {kind.letter: kind for kind in (ReduceGrads, GatherParams)}


ON_OPS = {kind.letter: kind for kind in (Exchange, Wait)}


def parse_action(text: str) -> Action:
    """The action that prints as `text`: parse_action("F3.0") == Forward(3, 0); else ValueError."""
    letter = text[:1]
    rest = text[1:]
    if letter in ON_MICROBATCH and (numbers := re.fullmatch(r"(\d+)\.(\d+)", rest)):
        return ON_MICROBATCH[letter](int(numbers[1]), int(numbers[2]))
    if letter in ON_CHUNK and re.fullmatch(r"\d+", rest):
        return ON_CHUNK[letter](int(rest))
    if letter in ON_OPS and rest[:1] == "[" and rest[-1:] == "]":
        return ON_OPS[letter](tuple(_parse_op(op) for op in rest[1:-1].split(",")))
    letters = (
        f"{'/'.join(ON_MICROBATCH)} with microbatch.chunk (F3.0), {'/'.join(ON_CHUNK)} with "
        "chunk (R0) or "
        f"{'/'.join(ON_OPS)} with operations (X[F3.0>1])"
    )
    raise ValueError(f"{text!r} is no action: {letters}")


def _parse_op(text: str) -> P2POp:
    match = re.fullmatch(r"([FB])(\d+)\.(\d+)([<>])(\d+)", text)
    if match is None:
        raise ValueError(
            f"{text!r} is no action: operations are like F3.0>1 (send) and B2.0<1 (receive)"
        )
    flow: Flow = "F" if match[1] == "F" else "B"
    return P2POp(flow, int(match[2]), int(match[3]), peer=int(match[5]), send=match[4] == ">")
