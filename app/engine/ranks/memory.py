"""Check a run's planned memory against that of a GPU."""

from __future__ import annotations

import os

import torch

from app.config import Run
from app.plan.formatting import GIB
from app.planner.plan import Plan


def fits(run: Run, device: torch.device) -> bool:
    """Return whether the planned peak fits into the GPU; True on a CPU.

    The GPU's memory is hardware.gpu_memory_gib, or else that of this device.
    """
    if device.type != "cuda":
        return True
    plan = Plan(run)
    if run.hardware.gpu_memory_gib is not None:
        return plan.fits
    return plan.busiest.total <= memory_of(run, device)


def memory_of(run: Run, device: torch.device) -> int:
    """Return the bytes of hardware.gpu_memory_gib, or of this GPU; on a CPU of the host."""
    if device.type != "cuda":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if run.hardware.gpu_memory_gib is not None:
        return int(run.hardware.gpu_memory_gib * GIB)
    return int(torch.cuda.get_device_properties(device).total_memory)
