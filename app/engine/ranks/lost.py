"""Errors by which gloo, NCCL and torch's store tell that the process at the other end has gone."""

from __future__ import annotations

# parts of their texts, once connected
CLOSED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection was likely closed",
    "remote process exited",
)
CONNECTING = "connectFullMesh"  # gloo's, where ranks cannot connect: mostly a wrong network


def lost_connection(error: BaseException, rank: int) -> str | None:
    """Return the line of a rank whose error only tells that another one has ended; None for other
    errors.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or CONNECTING in text:
        return None
    for part in CLOSED:
        if part in text:
            return (
                f"rank {rank}: lost its connection to another rank ({part}); that rank or its "
                "launcher says why; log.verbose=true prints the trace"
            )
    return None
