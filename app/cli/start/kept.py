"""State of a process that calls this program, given back as it was."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def streams_kept() -> Iterator[None]:
    """Give stdout and stderr back as they were, and the logger of `datasets`."""
    log = logging.getLogger("datasets")
    level, streams = log.level, (sys.stdout, sys.stderr)
    errors = [getattr(stream, "errors", None) for stream in streams]
    try:
        yield
    finally:
        log.setLevel(level)
        sys.stdout, sys.stderr = streams
        for stream, handling in zip(streams, errors, strict=True):
            if handling is not None and stream.errors != handling:
                stream.reconfigure(errors=handling)  # type: ignore[union-attr]


@contextmanager
def torch_kept() -> Iterator[None]:
    """Give random numbers, device and stream of torch back as they were, and unused GPU memory."""
    import torch

    state = torch.get_rng_state()
    if not torch.cuda.is_available():
        try:
            yield
        finally:
            torch.set_rng_state(state)
        return
    device, states = torch.cuda.current_device(), torch.cuda.get_rng_state_all()
    streams = [torch.cuda.current_stream(each) for each in {0, device}]
    try:
        yield
    finally:
        for stream in streams:
            torch.cuda.set_stream(stream)
        torch.cuda.set_device(device)
        torch.set_rng_state(state)
        torch.cuda.set_rng_state_all(states)
        torch.cuda.empty_cache()
