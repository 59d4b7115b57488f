"""Write a measured profile as a readable option of the config group `hardware`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from app.config import HardwareConfig, HardwareProfile
from app.config.profile import FORMAT
from app.own_files import write_whole
from app.plan.cost.flops import peak_tflops
from app.programs import command_name

# not measured; docs/planning.md explains them: time between steps, overlapped share
STATED = {"step_ms": 2.0, "hidden": 0.13}
# link latencies if there is only one GPU: those of H200s
STARTS = {"collective_us": 20.0, "send_us": 30.0}
ROUNDED = 4  # significant digits
MAKERS = ("NVIDIA", "AMD", "Intel")


def gpu_words(device_name: str) -> str:
    """Return the driver's device name without the vendor: NVIDIA H200 -> H200."""
    return " ".join(word for word in device_name.split() if word not in MAKERS)


def measured_profile(
    device_name: str, source: str, speeds: Mapping[str, Any], links: Mapping[str, float]
) -> HardwareProfile:
    """Build the profile from measured speeds; `links` is empty if there is one GPU.

    Raises ConfigError for impossible speeds.
    """
    node = HardwareConfig().node_gb_s
    stated = {"ring_gb_s": node, "all_to_all_gb_s": node, "send_gb_s": node}
    found = {**STATED, **STARTS, **stated, **speeds, **links}
    # peer access is not measured: assumed as fast as ring collectives
    found.setdefault("peer_gb_s", found["ring_gb_s"])
    told = source if links else f"{source}; links as stated for any node, one GPU measured none"
    profile = HardwareProfile(format=FORMAT, gpu=gpu_words(device_name), source=told, **found)
    if (peak := peak_tflops(device_name)) is not None:
        profile.check_peak(peak)  # as on reading the file
    return profile


def write_profile(
    path: Path, profile: HardwareProfile, device_name: str, memory_gib: float | None
) -> None:
    """Write the profile as an option of `hardware`. Raises OSError."""
    peak = peak_tflops(device_name)
    lines = [
        f"# {device_name}, measured by {command_name('calibrate')}; units: app/config/profile.py",
        f"gpu_memory_gib: {_text(memory_gib)}",
        f"peak_tflops: {_text(peak)}",
        f"node_gb_s: {_text(profile.ring_gb_s)}",
        "profile:",
        *(f"  {each.name}: {_text(getattr(profile, each.name))}" for each in fields(profile)),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "\n".join(lines) + "\n")


def _text(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool() | int():
            return str(value)
        case float():
            return f"{float(f'{value:.{ROUNDED}g}'):g}" if abs(value) < 1e6 else str(value)
        case tuple() | list():
            return f"[{', '.join(map(_text, value))}]"
        case _:
            return "'" + re.sub("'", "''", str(value)) + "'"
