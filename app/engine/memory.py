"""Whether a GPU has memory for a run."""

from __future__ import annotations

import torch

from app.config import Run
from app.plan.plan import Plan


def fits(run: Run, device: torch.device) -> bool:
    """By its plan: in what the run says that a GPU has, or else in what this one has; always on a
    CPU.
    """
    if device.type != "cuda":
        return True
    plan = Plan(run)
    if run.hardware.gpu_memory_gib is not None:
        return plan.fits
    return plan.busiest.total <= torch.cuda.get_device_properties(device).total_memory
