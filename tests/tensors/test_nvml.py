"""What is asked of NVIDIA's management library, of one that answers from here."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.engine.report import nvml
from app.engine.report.nvml import Nvml

GPU = torch.device("cuda", 0)


def answering(pointer: Any, value: int, code: int = 0) -> int:
    """Write a number where a call wants it; returns the call's code."""
    pointer._obj.value = value
    return code


def library(**other: Any) -> SimpleNamespace:
    """A GPU at 990 of 1980 MHz on which two processes compute."""
    calls = {
        "nvmlInit_v2": lambda: 0,
        "nvmlDeviceGetHandleByUUID": lambda uuid, handle: 0 if uuid == b"GPU-12-34" else 6,
        "nvmlDeviceGetClockInfo": lambda device, kind, to: answering(to, 990 * (kind == 1)),
        "nvmlDeviceGetMaxClockInfo": lambda device, kind, to: answering(to, 1980 * (kind == 1)),
        "nvmlDeviceGetComputeRunningProcesses_v3": lambda device, count, to: answering(count, 2),
    }
    return SimpleNamespace(**calls | other)


def opened(monkeypatch: pytest.MonkeyPatch, found: SimpleNamespace, uuid: str) -> Nvml | None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    about = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    return Nvml.of(GPU)


def test_clock_is_a_share_of_the_highest(monkeypatch: pytest.MonkeyPatch):
    gpu = opened(monkeypatch, library(), "12-34")
    assert gpu is not None and gpu.clock() == 0.5 and gpu.processes() == 2


def test_what_a_driver_does_not_say_is_not_known(monkeypatch: pytest.MonkeyPatch):
    assert opened(monkeypatch, library(), "56-78") is None
    failing = {"nvmlDeviceGetClockInfo": lambda *given: 3}
    old = library(**failing)
    del old.nvmlDeviceGetComputeRunningProcesses_v3
    gpu = opened(monkeypatch, old, "12-34")
    assert gpu is not None and gpu.clock() is None and gpu.processes() is None


def test_hosts_without_the_library_have_no_readings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml, "LIBRARY", "libnone-such.so.1")
    assert Nvml.of(GPU) is None
