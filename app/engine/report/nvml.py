"""Clock, energy and other processes of a GPU, from NVIDIA's management library (NVML).

https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"  # comes with the driver
SM_CLOCK = 1  # NVML_CLOCK_SM
MOST_PROCESSES = 64


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Nvml:
    """Handle of one GPU."""

    library: Any
    device: ctypes.c_void_p

    @classmethod
    def of(cls, device: torch.device) -> Nvml | None:
        """Open the library for a GPU; None where it is missing or does not know the GPU."""
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
        handle = ctypes.c_void_p()
        # by UUID, since CUDA_VISIBLE_DEVICES renumbers
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
            uuid, ctypes.byref(handle)
        )
        return None if failed else cls(library, handle)

    def clock(self) -> float | None:
        """Return the clock of the multiprocessors over their highest, 0 to 1."""
        now, most = ctypes.c_uint(), ctypes.c_uint()
        failed = self.library.nvmlDeviceGetClockInfo(
            self.device, SM_CLOCK, ctypes.byref(now)
        ) or self.library.nvmlDeviceGetMaxClockInfo(self.device, SM_CLOCK, ctypes.byref(most))
        return None if failed or not most.value else now.value / most.value

    def processes(self) -> int | None:
        """Return how many processes compute on the GPU, this one included."""
        ask = getattr(self.library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if ask is None:  # a driver before 510
            return None
        count = ctypes.c_uint(MOST_PROCESSES)
        found = (_Process * MOST_PROCESSES)()
        failed = ask(self.device, ctypes.byref(count), found)
        return None if failed else count.value

    def millijoules(self) -> int | None:
        """Return the energy that the GPU has taken since the driver was loaded."""
        taken = ctypes.c_ulonglong()
        failed = self.library.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(taken))
        return None if failed else taken.value
