"""GPUs of a host as nvidia-smi reports them, and what a run needs of them.

nvidia-smi comes with the driver; its queries are described by `nvidia-smi --help-query-gpu`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from app.cli.host_checks.finding import CheckResult, fail, ok, skip, warn

FIELDS = (
    "name",
    "driver_version",
    "memory.used",
    "clocks.sm",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "compute_mode",
    "mig.mode.current",
)
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # new name, old name
ROWS = ("remapped_rows.pending", "remapped_rows.failure")
# bits of nvmlDeviceGetCurrentClocksEventReasons: a healthy GPU sets none of them
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
# oldest driver for CUDA's major version, from CUDA's release notes (minor version compatibility)
OLDEST_DRIVER = {12: (525, 60, 13), 13: (580, 65, 6)}
PCIE_GB_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.56}  # GB/s per lane and direction
BUSY_MIB = 1024.0  # memory of other processes that leaves room for a run
WAIT_S = 20.0
ANSI = re.compile(r"\x1b\[[0-9;]*m")
NONE = ("", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "[Unknown Error]")

Ask = Callable[[Sequence[str]], tuple[int, str]]  # arguments of nvidia-smi -> exit code, output


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; None where the driver does not say."""

    name: str
    driver: str
    used_mib: float | None
    ecc: str | None  # "Enabled", "Disabled"
    uncorrected: float | None  # ECC errors since the driver was loaded
    pcie_gen: float | None  # the highest of GPU and slot: the current one sinks when idle
    pcie_width: tuple[float, float] | None  # lanes now, and at most
    compute_mode: str | None
    mig: str | None
    reasons: int | None  # bits of SLOWDOWNS and others
    remapping: bool | None  # rows of memory wait for a reset, or could not be remapped


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs of a host that this process may see, and their links."""

    error: str | None = None  # what nvidia-smi says where it does not work
    gpus: tuple[Gpu, ...] = ()
    # how GPU i reaches GPU j, for i < j: NV18, PIX, PXB, PHB, NODE, SYS; None: not known
    paths: tuple[str, ...] | None = None
    nvlink_gb_s: tuple[float, ...] | None = None  # of each GPU's active links, one direction
    inactive_links: int = 0

    @property
    def link_gb_s(self) -> float | None:
        """GB/s in one direction of the slowest GPU's NVLinks, or else of its PCIe slot."""
        if self.nvlink_gb_s and min(self.nvlink_gb_s) > 0:
            return min(self.nvlink_gb_s)
        speeds = [
            PCIE_GB_S[int(each.pcie_gen)] * each.pcie_width[0]
            for each in self.gpus
            if each.pcie_gen in PCIE_GB_S and each.pcie_gen and each.pcie_width
        ]
        return min(speeds) if speeds and len(speeds) == len(self.gpus) else None


def ask_nvidia_smi(arguments: Sequence[str]) -> tuple[int, str]:
    """Run nvidia-smi; return its exit code and what it prints."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=WAIT_S
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {WAIT_S:.0f} s"
    return done.returncode, done.stdout or done.stderr


def read_gpus(ask: Ask | None = None) -> Gpus | None:
    """Return this host's GPUs; None without nvidia-smi: no NVIDIA driver is here."""
    if ask is None:
        if shutil.which("nvidia-smi") is None:
            return None
        ask = ask_nvidia_smi
    code, text = ask([f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"])
    if code:
        return Gpus(error=" ".join(text.split())[:200] or f"exit code {code}")
    rows = [dict(zip(FIELDS, _cells(line), strict=True)) for line in text.splitlines() if line]
    reasons = next(filter(None, (_column(ask, name, len(rows)) for name in REASONS)), None)
    remapped = [_column(ask, name, len(rows), "remapped-rows") for name in ROWS]
    gpus = []
    for place, row in enumerate(rows):
        said = [column[place] for column in remapped if column is not None]
        gpus.append(
            Gpu(
                name=row["name"],
                driver=row["driver_version"],
                used_mib=_number(row["memory.used"]),
                ecc=_text(row["ecc.mode.current"]),
                uncorrected=_number(row["ecc.errors.uncorrected.volatile.total"]),
                pcie_gen=_number(row["pcie.link.gen.max"]),
                pcie_width=_width(row),
                compute_mode=_text(row["compute_mode"]),
                mig=_text(row["mig.mode.current"]),
                reasons=_bits(reasons[place]) if reasons else None,
                remapping=any(map(_wrong, said)) if said else None,
            )
        )
    speeds, inactive = _nvlinks(ask, len(rows))
    return Gpus(None, tuple(gpus), _paths(ask, len(rows)), speeds, inactive)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _text(cell: str) -> str | None:
    return None if cell in NONE else cell


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _bits(cell: str) -> int | None:
    try:
        return int(cell, 0)
    except ValueError:
        return None


def _wrong(cell: str) -> bool:
    return cell not in (*NONE, "0", "No")


def _width(row: dict[str, str]) -> tuple[float, float] | None:
    now, most = (_number(row[f"pcie.link.width.{word}"]) for word in ("current", "max"))
    return None if now is None or most is None else (now, most)


def _column(ask: Ask, field: str, rows: int, kind: str = "gpu") -> list[str] | None:
    """Return one field of all GPUs; None where this driver does not know it."""
    code, text = ask([f"--query-{kind}={field}", "--format=csv,noheader,nounits"])
    found = [line.strip() for line in text.splitlines() if line.strip()]
    return found if code == 0 and len(found) == rows else None


def _paths(ask: Ask, count: int) -> tuple[str, ...] | None:
    """Return the upper triangle of the matrix of `nvidia-smi topo -m`."""
    code, text = ask(["topo", "-m"])
    if code:
        return None
    rows = [line.split() for line in ANSI.sub("", text).splitlines()]
    # The header has no name in front; GPUs come before network cards, in the same order as rows.
    found = [row[1 : count + 1] for row in rows if row and row[0] in _names(count) and "X" in row]
    if len(found) != count or any(len(row) != count for row in found):
        return None
    return tuple(found[i][j] for i in range(count) for j in range(i + 1, count))


def _names(count: int) -> set[str]:
    return {f"GPU{number}" for number in range(count)}


def _nvlinks(ask: Ask, count: int) -> tuple[tuple[float, ...] | None, int]:
    """Return GB/s of each GPU's active links, None without NVLink; and how many are inactive."""
    code, text = ask(["nvlink", "--status"])
    parts = re.split(r"^GPU \d+:", text, flags=re.MULTILINE)[1:]
    if code or len(parts) != count:
        return None, 0
    speeds = [re.findall(r"Link \d+: ([\d.]+) GB/s", part) for part in parts]
    if not any(speeds):
        return None, 0
    return tuple(sum(map(float, each)) for each in speeds), text.count("<inactive>")


def judge_gpus(read: Gpus | None, torch_cuda: str | None) -> list[CheckResult]:
    """Return the findings; `torch_cuda` is the CUDA version that torch was built for, or None."""
    if read is None:
        if torch_cuda is None:
            return [skip("GPUs", "no NVIDIA driver on this host: runs use the CPU")]
        advice = "install the driver, or give the container the GPUs (--gpus all, --nv, CDI)"
        return [fail("GPUs", f"torch for CUDA {torch_cuda}, but no nvidia-smi", advice)]
    if read.error is not None:
        advice = "reload the driver or restart this node; drain it meanwhile"
        return [fail("GPUs", f"nvidia-smi: {read.error}", advice)]
    if not read.gpus:
        return [fail("GPUs", "nvidia-smi lists none", "ask for GPUs: --gpus-per-node, --gpus all")]
    return [
        _models(read),
        _driver(read.gpus[0].driver, torch_cuda),
        *_health(read.gpus),
        _clocks(read.gpus),
        _pcie(read.gpus),
        *_topology(read),
    ]


def _models(read: Gpus) -> CheckResult:
    names = [each.name for each in read.gpus]
    told = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if len(set(names)) > 1:
        return warn("GPUs", told, "use GPUs of one kind: all wait for the slowest in every step")
    return ok("GPUs", told)


def _driver(driver: str, torch_cuda: str | None) -> CheckResult:
    if torch_cuda is None:
        advice = "install torch with CUDA: pip install --force-reinstall torch"
        return fail("driver", f"driver {driver}, but torch is a CPU build", advice)
    oldest = OLDEST_DRIVER.get(int(torch_cuda.split(".")[0]))
    told = f"driver {driver}, torch for CUDA {torch_cuda}"
    if oldest is None:
        return skip("driver", f"{told}: the oldest driver for it is not known here")
    if tuple(map(int, re.findall(r"\d+", driver))) < oldest:
        least = ".".join(map(str, oldest))
        advice = f"update the driver to {least} or newer, or take a torch for an older CUDA"
        return fail("driver", told, advice)
    return ok("driver", told)


def _listed(gpus: Sequence[Gpu], wrong: Callable[[Gpu], object]) -> str:
    return ", ".join(str(place) for place, each in enumerate(gpus) if wrong(each))


def _health(gpus: Sequence[Gpu]) -> Iterator[CheckResult]:
    """Yield findings on ECC memory and on what keeps the GPUs from a run's use."""
    broken = _listed(gpus, lambda gpu: gpu.uncorrected or gpu.remapping)
    off = _listed(gpus, lambda gpu: gpu.ecc == "Disabled")
    if broken:
        advice = "drain the node and reset these GPUs (nvidia-smi --gpu-reset); replace if it stays"
        yield fail("ECC", f"uncorrected errors or rows to be remapped on GPU {broken}", advice)
    elif off:
        yield warn("ECC", f"off on GPU {off}", "nvidia-smi --ecc-config=1, then restart the node")
    elif all(gpu.uncorrected is None for gpu in gpus):
        yield skip("ECC", "these GPUs report no errors of memory")
    else:
        yield ok("ECC", "no uncorrected errors")
    if closed := _listed(gpus, lambda gpu: gpu.compute_mode == "Prohibited"):
        advice = "nvidia-smi --compute-mode=DEFAULT, as root"
        yield fail("GPU use", f"compute mode Prohibited on GPU {closed}", advice)
    elif busy := _listed(gpus, lambda gpu: (gpu.used_mib or 0) > BUSY_MIB):
        most = max(gpu.used_mib or 0 for gpu in gpus) / 1024
        advice = "end the other processes (nvidia-smi lists them), or take other GPUs"
        yield warn("GPU use", f"up to {most:.1f} GiB taken on GPU {busy}", advice)
    elif cut := _listed(gpus, lambda gpu: gpu.mig == "Enabled"):
        advice = "NCCL needs full GPUs for several ranks; one rank per slice works alone"
        yield warn("GPU use", f"MIG on GPU {cut}", advice)
    else:
        yield ok("GPU use", "free")


def _clocks(gpus: Sequence[Gpu]) -> CheckResult:
    if all(gpu.reasons is None for gpu in gpus):
        return skip("GPU clocks", "this driver does not say why clocks are lowered")
    slow = {
        why: _listed(gpus, lambda gpu, bit=bit: (gpu.reasons or 0) & bit)  # type: ignore[misc]
        for bit, why in SLOWDOWNS.items()
    }
    found = ", ".join(f"{why} on GPU {which}" for why, which in slow.items() if which)
    if found:
        advice = "check cooling and power of the node (nvidia-smi -q -d PERFORMANCE)"
        return warn("GPU clocks", f"lowered: {found}", advice)
    return ok("GPU clocks", "not lowered by heat or power")


def _pcie(gpus: Sequence[Gpu]) -> CheckResult:
    if any(gpu.pcie_width is None for gpu in gpus):
        return skip("PCIe", "the driver does not report the slots")
    widths = [gpu.pcie_width for gpu in gpus if gpu.pcie_width is not None]
    narrow = ", ".join(str(place) for place, (now, most) in enumerate(widths) if now < most)
    if narrow:
        lanes = min(now for now, _ in widths)
        advice = "reseat the card or its riser; host copies and networks run at that part"
        return warn("PCIe", f"only {lanes:.0f} lanes on GPU {narrow}", advice)
    gens = {f"{gpu.pcie_gen:.0f}" for gpu in gpus if gpu.pcie_gen is not None}
    return ok("PCIe", f"generation {'/'.join(sorted(gens)) or '?'}, {widths[0][0]:.0f} lanes")


def _topology(read: Gpus) -> Iterator[CheckResult]:
    """Yield findings on the links between the GPUs of the host."""
    if len(read.gpus) < 2:
        return
    if read.paths is None:
        yield skip("GPU links", "nvidia-smi topo -m does not say")
        return
    kinds = sorted(set(read.paths))
    told = ", ".join(kinds)
    if read.nvlink_gb_s:
        told += f"; NVLink {min(read.nvlink_gb_s):.0f} GB/s per GPU and direction"
    linked = [kind.startswith("NV") for kind in read.paths]
    uneven = read.nvlink_gb_s is not None and len(set(read.nvlink_gb_s)) > 1
    if all(linked) and (read.inactive_links or uneven):
        advice = "restart Fabric Manager or the node (nvidia-smi nvlink --status names the links)"
        yield warn("GPU links", f"{told}; {read.inactive_links} links inactive", advice)
    elif all(linked):
        yield ok("GPU links", told)
    elif any(linked):
        yield warn("GPU links", told, "keep tp and ep among the GPUs that NVLink connects")
    else:
        advice = "no NVLink: prefer dp and pp over tp and ep; peer access needs PCIe ACS off"
        yield warn("GPU links", told, advice)
