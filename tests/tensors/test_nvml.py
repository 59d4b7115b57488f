"""What is asked of NVIDIA's management library, of one that answers from here."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch

from app.engine.report import nvml
from app.engine.report.energy import energy_counter
from app.engine.report.nvml import Nvml

GPU = torch.device("cuda", 0)
NAME = UUID(int=2**128 - 3)


def answering(pointer: Any, value: int, code: int = 0) -> int:
    """Write a number where a call wants it; returns the call's code."""
    pointer._obj.value = value
    return code


def library(**other: Any) -> SimpleNamespace:
    """A GPU at 990 of 1980 MHz on which two processes compute."""
    calls = {
        "nvmlInit_v2": lambda: 0,
        "nvmlDeviceGetHandleByUUID": lambda uuid, handle: (
            0 if uuid == f"GPU-{NAME}".encode() else 6
        ),
        "nvmlDeviceGetClockInfo": lambda device, kind, to: answering(to, 990 * (kind == 1)),
        "nvmlDeviceGetMaxClockInfo": lambda device, kind, to: answering(to, 1980 * (kind == 1)),
        "nvmlDeviceGetTotalEnergyConsumption": lambda device, to: answering(to, 2**40 + 9),
        "nvmlDeviceGetComputeRunningProcesses_v3": lambda device, count, to: answering(count, 2),
    }
    return SimpleNamespace(**calls | other)


def opened(monkeypatch: pytest.MonkeyPatch, found: SimpleNamespace, name: str) -> Nvml | None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    about = SimpleNamespace(uuid=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    return Nvml.of(GPU)


def test_clock_is_a_share_of_the_highest(monkeypatch: pytest.MonkeyPatch):
    gpu = opened(monkeypatch, library(), str(NAME))
    assert gpu is not None and gpu.clock() == 0.5 and gpu.processes() == 2


def test_what_a_driver_does_not_say_is_not_known(monkeypatch: pytest.MonkeyPatch):
    assert opened(monkeypatch, library(), "56-78") is None
    failing = {"nvmlDeviceGetClockInfo": lambda *given: 3}
    old = library(**failing)
    del old.nvmlDeviceGetComputeRunningProcesses_v3
    gpu = opened(monkeypatch, old, str(NAME))
    assert gpu is not None and gpu.clock() is None and gpu.processes() is None


def test_energy_is_counted_in_millijoules_by_gpu(monkeypatch: pytest.MonkeyPatch):
    opened(monkeypatch, library(), str(NAME))
    found = energy_counter(GPU)
    assert found is not None and (found.identity, found.read()) == (NAME, 2**40 + 9)


def test_gpu_without_counter_or_slice_of_one_has_no_energy(monkeypatch: pytest.MonkeyPatch):
    opened(monkeypatch, library(nvmlDeviceGetTotalEnergyConsumption=lambda *given: 3), str(NAME))
    assert energy_counter(GPU) is None
    opened(monkeypatch, library(), "56-78")
    assert energy_counter(GPU) is None


def test_hosts_without_the_library_have_no_readings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml, "LIBRARY", "libnone-such.so.1")
    assert Nvml.of(GPU) is None
