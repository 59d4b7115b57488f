"""A measured profile as an option of `hardware` that people can read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from app.config import HardwareConfig, HardwareProfile
from app.config.profile import FORMAT
from app.plan.cost.flops import peak_tflops

# what is not measured, and as docs/planning.md has it: between steps, and beside compute
STATED = {"step_ms": 2.0, "hidden": 0.13}
# of links, where there is one GPU: starts as on H200s, and the speed inside a node that is stated
STARTS = {"collective_us": 20.0, "send_us": 30.0}
ROUNDED = 4  # digits that count
MAKERS = ("NVIDIA", "AMD", "Intel")


def gpu_words(device_name: str) -> str:
    """What tells a GPU from others in the name that its driver reports: NVIDIA H200 -> H200."""
    return " ".join(word for word in device_name.split() if word not in MAKERS)


def measured_profile(
    device_name: str, source: str, speeds: Mapping[str, Any], links: Mapping[str, float]
) -> HardwareProfile:
    """The profile of what was measured; `links` is empty where there is one GPU. ConfigError for
    speeds that nothing has.
    """
    node = HardwareConfig().node_gb_s
    stated = {"ring_gb_s": node, "all_to_all_gb_s": node, "send_gb_s": node}
    found = {**STATED, **STARTS, **stated, **speeds, **links}
    # kernels that read other GPUs' memory are not measured: as a ring
    found.setdefault("peer_gb_s", found["ring_gb_s"])
    told = source if links else f"{source}; links as stated for any node, one GPU measured none"
    profile = HardwareProfile(format=FORMAT, gpu=gpu_words(device_name), source=told, **found)
    if (peak := peak_tflops(device_name)) is not None:
        profile.check_peak(peak)  # as who reads the file does
    return profile


def write_profile(
    path: Path, profile: HardwareProfile, device_name: str, memory_gib: float | None
) -> None:
    """Write an option of `hardware`. Raises OSError."""
    peak = peak_tflops(device_name)
    lines = [
        f"# {device_name}, measured by python -m app.cli.calibrate; units: app/config/profile.py",
        f"gpu_memory_gib: {_text(memory_gib)}",
        f"peak_tflops: {_text(peak)}",
        f"node_gb_s: {_text(profile.ring_gb_s)}",
        "profile:",
        *(f"  {each.name}: {_text(getattr(profile, each.name))}" for each in fields(profile)),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(path)


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
