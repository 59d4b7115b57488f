"""Whether a GPU has memory for a run."""

from __future__ import annotations

import os

import torch

from app.config import Run
from app.plan.plan import GIB, Plan


def fits(run: Run, device: torch.device) -> bool:
    """By its plan: in what the run says that a GPU has, or else in what this one has; always on a
    CPU.
    """
    if device.type != "cuda":
        return True
    plan = Plan(run)
    if run.hardware.gpu_memory_gib is not None:
        return plan.fits
    return plan.busiest.total <= memory_of(run, device)


def memory_of(run: Run, device: torch.device) -> int:
    """Bytes that a GPU has, of what the run says of it or else of this one; on a CPU the host's."""
    if device.type != "cuda":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if run.hardware.gpu_memory_gib is not None:
        return int(run.hardware.gpu_memory_gib * GIB)
    return int(torch.cuda.get_device_properties(device).total_memory)
