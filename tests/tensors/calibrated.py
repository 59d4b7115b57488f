"""The command that measures as torchrun starts it, on processes of a CPU in place of GPUs."""

from __future__ import annotations

import os
import sys

import torch

from app.cli import calibrate, measure
from app.cli.processes.launcher import Launch
from tests.tensors.calibrate import TINY, Counting


def cpu_of(launch: Launch) -> measure.Measured:
    """Small sizes, by gloo."""
    device = torch.device("cpu")
    return measure.Measured(device, "NVIDIA H200", 139.8, "a test", backend="gloo", sizes=TINY)


if __name__ == "__main__":
    measure.gpu_of = cpu_of
    measure.Clock = lambda device: Counting()  # what else runs here must not be seen in it
    sys.exit(calibrate.main(sys.argv[1:], os.getppid()))
