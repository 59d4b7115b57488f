"""Actions of a pipeline rank within a step; each prints as a short word that begins with a letter:

    F  forward                        X  start sends and receives (P2P)
    B  backward                       V  wait for sends and receives
    I  backward of the input only     D  deallocate a sent output
    W  backward of the weights only   G  gather parameters before first use
                                      R  reduce gradients

I and W are the halves of a split backward (zero bubble). D is what Megatron-LM calls
`deallocate_output_tensor`.
"""

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
    """Forward or backward work, of which a schedule consists; lowering adds all other actions."""

    __slots__ = ()


class Forward(Compute):
    """Forward of a microbatch through a chunk: F3.0."""

    __slots__ = ()
    letter: ClassVar[str] = "F"


class Backward(Compute):
    """Full backward, gradients of input and weights: B3.0."""

    __slots__ = ()
    letter: ClassVar[str] = "B"


class BackwardInput(Compute):
    """Backward that computes only the gradient of the chunk's input: I3.0."""

    __slots__ = ()
    letter: ClassVar[str] = "I"


class BackwardWeight(Compute):
    """Weight gradients, the other half of a split backward.

    Any time after its BackwardInput: W3.0.
    """

    __slots__ = ()
    letter: ClassVar[str] = "W"


class Free(OnMicrobatch):
    """Free the memory of a forward's sent output, of which only grad_fn is still needed: D3.0."""

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
    """Start the reduce-scatters of a chunk's gradients that have not started: R0.

    With optim.overlap_grads, an unsplit last backward has started those of complete buckets.
    """

    __slots__ = ()
    letter: ClassVar[str] = "R"


class GatherParams(OnChunk):
    """All-gather a chunk's updated parameters from the data-parallel ranks: G0.

    No-op with optim.overlap_params: the all-gathers have started, and modules wait for theirs.
    """

    __slots__ = ()
    letter: ClassVar[str] = "G"


# tensors between stages: hidden states (F) or their gradients (B)
Flow = Literal["F", "B"]


# Lists hold and look up tens of thousands of these: a tuple takes half the time of a dataclass.
class P2POp(NamedTuple):
    """Send or receive of a tensor, as a plain value.

    The transport builds its counterpart with a tensor, `torch.distributed.P2POp`. Prints as F3.0>1
    (send to rank 1) or F3.0<0 (receive from rank 0). `mb` and `chunk` name the forward (flow F) or
    backward (flow B) of this rank that produced the sent tensor, or that needs the received one. A
    BackwardInput counts as backward.
    """

    flow: Flow
    mb: int
    chunk: int
    peer: int  # pipeline rank on the other side
    send: bool  # to the peer; False: from it

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
    """Start sends and receives as one batch without waiting: X[F3.0>1,B2.0<1].

    Tensors between the same two ranks in the same direction match in the order in which they are
    listed.
    """

    __slots__ = ()
    letter: ClassVar[str] = "X"


class Wait(OnOps):
    """Wait until these operations of earlier exchanges are complete: V[B2.0<1]."""

    __slots__ = ()
    letter: ClassVar[str] = "V"


Action = Compute | Exchange | Wait | Free | ReduceGrads | GatherParams
