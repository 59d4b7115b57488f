"""What a pipeline rank does within a step: actions that print as short words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

MicrobatchChunk = tuple[int, int]  # microbatch within the step, n-th stage of this rank


@dataclass(frozen=True, slots=True)
class OnMicrobatch:
    """Work on one microbatch in one chunk of this rank; prints as letter, microbatch.chunk."""

    letter: ClassVar[str]
    mb: int  # microbatch within the step, from 0
    chunk: int  # n-th stage of this rank, from 0

    def __str__(self) -> str:
        return f"{self.letter}{self.mb}.{self.chunk}"


class Compute(OnMicrobatch):
    """What a schedule consists of; everything else is added by lowering."""

    __slots__ = ()


class Forward(Compute):
    """Forward of a microbatch through a chunk: F3.0."""

    __slots__ = ()
    letter: ClassVar[str] = "F"


class Backward(Compute):
    """Whole backward, gradients of input and of weights: B3.0."""

    __slots__ = ()
    letter: ClassVar[str] = "B"


class BackwardInput(Compute):
    """Backward that yields only the gradient of the chunk's input: I3.0."""

    __slots__ = ()
    letter: ClassVar[str] = "I"


class BackwardWeight(Compute):
    """Weight gradients, the rest of a split backward; any time after its BackwardInput: W3.0."""

    __slots__ = ()
    letter: ClassVar[str] = "W"


class Free(OnMicrobatch):
    """Give back the memory of a forward's sent output; only its grad_fn is still needed: D3.0."""

    __slots__ = ()
    letter: ClassVar[str] = "D"


@dataclass(frozen=True, slots=True)
class OnChunk:
    """Work on the parameters of one chunk of this rank; prints as letter and chunk."""

    letter: ClassVar[str]
    chunk: int  # n-th stage of this rank, from 0

    def __str__(self) -> str:
        return f"{self.letter}{self.chunk}"


class ReduceGrads(OnChunk):
    """Start the reduction of a chunk's gradients over the data-parallel ranks: R0."""

    __slots__ = ()
    letter: ClassVar[str] = "R"


class GatherParams(OnChunk):
    """Gather a chunk's updated parameters from the data-parallel ranks: G0."""

    __slots__ = ()
    letter: ClassVar[str] = "G"


# what moves between stages: hidden states forward, their gradients backward
Flow = Literal["F", "B"]


# lists hold and look up tens of thousands: a tuple takes half the time of a dataclass
class P2POp(NamedTuple):
    """A tensor that this rank sends or receives; prints as F3.0>1 (to rank 1) or F3.0<0 (from 0).

    `mb` and `chunk` name this rank's forward (flow F) or backward (flow B): the one that made what
    is sent, or the one that needs what is received. A BackwardInput counts as backward.
    """

    flow: Flow
    mb: int
    chunk: int
    peer: int  # pipeline rank on the other side
    send: bool  # to the peer; otherwise from it

    def __str__(self) -> str:
        return f"{self.flow}{self.mb}.{self.chunk}{'>' if self.send else '<'}{self.peer}"


@dataclass(frozen=True, slots=True)
class OnOps:
    """Work on tensors that move between pipeline ranks; prints as letter and [operations]."""

    letter: ClassVar[str]
    ops: tuple[P2POp, ...]

    def __str__(self) -> str:
        return f"{self.letter}[{','.join(map(str, self.ops))}]"


class Exchange(OnOps):
    """Start sends and receives as one batch, and go on: X[F3.0>1,B2.0<1].

    Tensors between the same two ranks in the same direction match in the order in which they are
    listed.
    """

    __slots__ = ()
    letter: ClassVar[str] = "X"


class Wait(OnOps):
    """Wait until these operations of earlier exchanges are done: V[B2.0<1]."""

    __slots__ = ()
    letter: ClassVar[str] = "V"


Action = Compute | Exchange | Wait | Free | ReduceGrads | GatherParams
