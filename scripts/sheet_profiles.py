"""Write the options of `hardware` whose profiles come from data sheets.

    python scripts/sheet_profiles.py

Each is the measured profile of the H100 times the ratio of the two data sheets: compute by the
dense 16-bit peak, memory-bound kernels by the bandwidth of memory, links by theirs. Host and
latencies stay. What `calibrate` measures takes its place under a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
HARDWARE = ROOT / "conf/hardware"
MEASURED = "h100"
MEASURED_GB_S = 3352.0  # memory bandwidth of an H100 SXM by its data sheet
COMPUTE, MEMORY = ("gemm_tflops", "sustained_tflops", "router_tflops", "grouped_tflops"), "_gb_s"
LINKS = ("ring_gb_s", "all_to_all_gb_s", "peer_gb_s", "send_gb_s")
DIGITS = 4  # significant ones


@dataclass(frozen=True, slots=True)
class Sheet:
    """Numbers of a GPU's data sheet."""

    name: str  # of the option
    gpu: str  # in the name that its driver reports
    what: str  # first line of the file
    memory_gib: float  # usable
    peak_tflops: float  # dense, 16 bits, accumulated in float32
    memory_gb_s: float
    node_gb_s: float  # all-to-all among GPUs of one node
    network_gb_s: float
    host_gb_s: float  # of copies to page-locked host memory
    fp8: bool  # whether its FP8 peak is twice that of 16 bits


SHEETS = (
    Sheet(
        "a100",
        gpu="A100",
        what="A100 SXM: 80 GB HBM2e; NVLink 3 and one 200 Gb/s network card per GPU.",
        memory_gib=79.1,
        peak_tflops=312,
        memory_gb_s=2039,
        node_gb_s=187,  # NVLink 3 has two thirds of NVLink 4's bandwidth
        network_gb_s=22.5,
        host_gb_s=27.5,  # PCIe 4.0 has half of the H100's PCIe 5.0
        fp8=False,
    ),
    Sheet(
        "b200",
        gpu="B200",
        what="B200 SXM: 180 GB HBM3e usable; NVLink 5 and one 400 Gb/s network card per GPU.",
        memory_gib=178.4,
        peak_tflops=2250,
        memory_gb_s=7700,
        node_gb_s=560,  # twice NVLink 4's
        network_gb_s=45,
        host_gb_s=55,
        fp8=True,
    ),
    Sheet(
        "rtx4090",
        gpu="RTX 4090",
        what="RTX 4090: 24 GB GDDR6X; PCIe 4.0 x16 and a quarter of a 400 Gb/s network per GPU.",
        memory_gib=23.5,
        peak_tflops=165.2,
        memory_gb_s=1008,
        node_gb_s=20,  # PCIe 4.0 x16 moves 32 GB/s, through the host's memory
        network_gb_s=11,
        host_gb_s=27.5,  # PCIe 4.0
        fp8=True,
    ),
)


def scaled(sheet: Sheet, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the profile of a data sheet, from the measured one of the option MEASURED."""
    compute = sheet.peak_tflops / measured["peak_tflops"]
    memory = sheet.memory_gb_s / MEASURED_GB_S
    links = sheet.node_gb_s / measured["node_gb_s"]
    found: dict[str, Any] = {}
    for name, value in measured["profile"].items():
        if name == "attention":
            value = [[*row[:2], *(_rounded(compute * rate) for rate in row[2:])] for row in value]
        elif name.startswith("fp8_"):
            ratio = memory if name.endswith(MEMORY) else compute
            value = _rounded(ratio * value) if sheet.fp8 else None
        elif name in COMPUTE:
            value = _rounded(compute * value)
        elif name in LINKS:
            value = _rounded(links * value)
        elif name.endswith(MEMORY):
            pair = isinstance(value, list)
            value = (
                [_rounded(memory * each) for each in value] if pair else _rounded(memory * value)
            )
        found[name] = value
    source = (
        f"scaled from the H100 by data sheets. Compute × {compute:.3g}, memory × {memory:.3g}, "
        f"links × {links:.3g}; launches and latencies as there"
    )
    return found | {"gpu": sheet.gpu, "source": source, "host_gb_s": sheet.host_gb_s}


def option(sheet: Sheet) -> str:
    """Return the file of a data sheet's option."""
    measured = yaml.safe_load((HARDWARE / f"{MEASURED}.yaml").read_text(encoding="utf-8"))
    return "\n".join(_lines(sheet, scaled(sheet, measured))) + "\n"


def _lines(sheet: Sheet, profile: dict[str, Any]) -> Iterator[str]:
    yield f"# {sheet.what}"
    yield f"gpu_memory_gib: {sheet.memory_gib:g}"
    yield f"peak_tflops: {sheet.peak_tflops:g}"
    yield f"node_gb_s: {sheet.node_gb_s:g}"
    yield f"network_gb_s: {sheet.network_gb_s:g}"
    yield "# python scripts/sheet_profiles.py writes this; keys and units: app/config/profile.py"
    yield "profile:"
    for name, value in profile.items():
        yield f"  {name}: {_text(value)}"


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _text(value: object) -> str:
    match value:
        case None:
            return "null"
        case str():
            return f"'{value}'"
        case list():
            return f"[{', '.join(map(_text, value))}]"
        case _:
            return f"{value:g}"


def main() -> None:
    """Write all options."""
    for sheet in SHEETS:
        (HARDWARE / f"{sheet.name}.yaml").write_text(option(sheet), encoding="utf-8")


if __name__ == "__main__":
    main()
