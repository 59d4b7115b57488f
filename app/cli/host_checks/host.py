"""Cores, memory, limits, libraries and storage of this host, and what a run needs of them."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.cli.host_checks.finding import CheckResult, fail, ok, skip, warn
from app.programs import command_name

GIB = 2**30
OLDEST_TORCH = (2, 11)  # as in pyproject.toml
CORES_PER_GPU = 4  # ranks, their loaders and NCCL's threads
MEMORY_GIB_PER_GPU = 32.0
SHM_GIB = 1.0  # NCCL and gloo keep buffers there; containers have 64 MiB unless told
OPEN_FILES = 4096
FREE_GIB = 20.0
WRITTEN = 64 * 2**20  # bytes of the file that is written
SLOW_MB_S = 200.0


@dataclass(frozen=True, slots=True)
class Host:
    """Readings of this host; speeds are measured."""

    cores: float  # that this process may use
    load: float  # processes that ran in the last minute, on all cores
    all_cores: int
    memory_gib: float  # that this process may use: of the host, or of its control group
    shm_gib: float | None  # free in /dev/shm; None where there is none
    memlock_gib: float | None  # memory that may be locked; None: no limit
    open_files: int
    governor: str | None  # of the clocks of core 0
    python: str
    torch: str


@dataclass(frozen=True, slots=True)
class Storage:
    """The file system of the run folder."""

    folder: Path  # the nearest folder that exists
    free_gib: float
    write_mb_s: float | None = None
    error: str | None = None  # why no run can be written there
    locks: bool | None = None  # a second lock of a file is refused, as it should be
    made: Path | None = None  # the run folder as typed, if a run would make it below `folder`


def read_host(torch_version: str, root: Path = Path("/")) -> Host:
    """Return what Linux says; `root` is the folder of proc and sys."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = root / "dev/shm"
    return Host(
        cores=_cores(root),
        load=os.getloadavg()[0],
        all_cores=os.cpu_count() or 1,
        memory_gib=_memory(root) / GIB,
        shm_gib=shutil.disk_usage(shm).free / GIB if shm.is_dir() else None,
        memlock_gib=None if soft == resource.RLIM_INFINITY else soft / GIB,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        python=platform.python_version(),
        torch=torch_version,
    )


def host_identity(name: str, root: Path = Path("/")) -> str:
    """Return what tells this host apart from others of the same name: its boot, and the network and
    mounts of its container. Where Linux does not say, the name alone counts.
    """
    found = [name, _text(root / "proc/sys/kernel/random/boot_id") or ""]
    for kind in ("net", "mnt"):
        with suppress(OSError):
            found.append(os.readlink(root / f"proc/self/ns/{kind}"))
    return " ".join(found)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _cores(root: Path) -> float:
    """Return the cores of this process: its affinity, or fewer by the quota of its group."""
    cores = float(len(os.sched_getaffinity(0)))
    quota, _, period = (_text(root / "sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def _memory(root: Path) -> float:
    """Return bytes of memory: what is available, or what is left of the group's limit."""
    lines = (_text(root / "proc/meminfo") or "").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    limit = _text(root / "sys/fs/cgroup/memory.max") or "max"
    used = int(_text(root / "sys/fs/cgroup/memory.current") or 0)
    free = float(found.get("MemAvailable", 0))
    return free if limit == "max" else min(free, int(limit) - used)


def read_storage(run_dir: Path) -> Storage:
    """Write, sync and lock a file beside the run folder; it is removed again."""
    above = (run_dir, *run_dir.parents, Path())  # Path(): of "..", which has no parent
    there = next(path for path in above if os.path.lexists(path))
    blocked = None if os.path.isdir(there) else there  # no folder can be made below it
    folder = (there.parent if blocked else there).absolute()
    free = shutil.disk_usage(folder).free / GIB
    if blocked:
        kind = "a file" if os.path.exists(blocked) else "a link to nothing"
        return Storage(folder, free, error=f"{blocked} is {kind}")
    made = None if there == run_dir else run_dir
    if free * GIB < 2 * WRITTEN:
        return Storage(folder, free, error=_unwritable(folder, os.strerror(errno.ENOSPC)))
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".graphfold-doctor-") as file:
            data = os.urandom(2**20)
            began = time.monotonic()
            for _ in range(WRITTEN // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            speed = WRITTEN / (time.monotonic() - began) / 1e6
            locks = _locks(Path(file.name))
            return Storage(folder, free, write_mb_s=speed, locks=locks, made=made)
    except OSError as error:
        return Storage(folder, free, error=_unwritable(folder, error.strerror or str(error)))


def _unwritable(folder: Path, why: str) -> str:
    return f"{folder} cannot be written: {why}"


def _locks(path: Path) -> bool:
    """Return whether a locked file cannot be locked once more, as runs rely on."""
    with path.open("rb") as first, path.open("rb") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def judge_host(read: Host, gpus: int, rdma: bool) -> list[CheckResult]:
    """Return the findings for `gpus` GPUs, and with `rdma` for InfiniBand or RoCE cards."""
    return [
        _libraries(read),
        _processor(read, gpus),
        *_governor(read),
        _room(read, gpus),
        _shm(read),
        _limits(read, rdma),
    ]


def _libraries(read: Host) -> CheckResult:
    told = f"Python {read.python}, torch {read.torch}"
    version = tuple(int(part) for part in read.torch.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        least = ".".join(map(str, OLDEST_TORCH))
        return fail("libraries", told, f"needs torch {least} or newer: pip install -U torch")
    return ok("libraries", told)


def _processor(read: Host, gpus: int) -> CheckResult:
    told = f"{read.cores:g} cores, load {read.load:.1f}"
    if read.cores < CORES_PER_GPU * gpus:
        advice = f"ask for {CORES_PER_GPU} per GPU: --cpus-per-task={CORES_PER_GPU * gpus}"
        return warn("cores", f"{told} for {gpus} GPUs", advice)
    if read.load > read.all_cores:
        return warn("cores", told, "other programs are busy here (top); end them or move")
    return ok("cores", told)


def _governor(read: Host) -> Iterator[CheckResult]:
    if read.governor == "powersave":
        advice = "cpupower frequency-set --governor performance, as root"
        yield warn("CPU clocks", "governor powersave", advice)
    elif read.governor is not None:
        yield ok("CPU clocks", f"governor {read.governor}")


def _room(read: Host, gpus: int) -> CheckResult:
    told = f"{read.memory_gib:.0f} GiB free"
    least = MEMORY_GIB_PER_GPU * gpus
    if read.memory_gib < least:
        advice = f"ask for {least:.0f} GiB (--mem={least:.0f}G): pinned buffers and checkpoints"
        return warn("memory", told, advice)
    return ok("memory", told)


def _shm(read: Host) -> CheckResult:
    advice = "mount more: --shm-size 8g, or in Kubernetes an emptyDir of medium Memory"
    if read.shm_gib is None:
        return fail("/dev/shm", "missing", advice)
    told = f"{read.shm_gib:.2f} GiB free"
    return warn("/dev/shm", told, advice) if read.shm_gib < SHM_GIB else ok("/dev/shm", told)


def _limits(read: Host, rdma: bool) -> CheckResult:
    locked = "unlimited" if read.memlock_gib is None else f"{read.memlock_gib:.2f} GiB"
    told = f"locked memory {locked}, {read.open_files} open files"
    if rdma and read.memlock_gib is not None:
        advice = "ulimit -l unlimited; for jobs, LimitMEMLOCK=infinity of slurmd or docker"
        return fail("limits", f"{told}: RDMA cannot register buffers", advice)
    if read.open_files < OPEN_FILES:
        return warn("limits", told, f"ulimit -n {OPEN_FILES}: sockets of many ranks, shards")
    return ok("limits", told)


def judge_storage(read: Storage) -> list[CheckResult]:
    """Return the findings on the folder of runs."""
    if read.error is not None:
        advice = "give another one with run_dir=…"
        told = f"{read.error}; {read.free_gib:.0f} GiB free"
        return [fail("storage", told, advice)]
    assert read.write_mb_s is not None, "written"
    where = f"{read.made} will be made below {read.folder}" if read.made else f"{read.folder}"
    told = f"{where}: {read.free_gib:.0f} GiB free, {read.write_mb_s:.0f} MB/s written"
    if read.free_gib < FREE_GIB:
        found = warn("storage", told, f"make room; {command_name('plan')} what=memory tells sizes")
    elif read.write_mb_s < SLOW_MB_S:
        advice = "use a faster file system: saving 16 GB takes "
        advice += f"{16_000 / read.write_mb_s / 60:.1f} minutes here"
        found = warn("storage", told, advice)
    else:
        found = ok("storage", told)
    if read.locks is None:
        return [found, skip("locks", "not tried")]
    if not read.locks:
        advice = "mount with locks (NFS: without nolock); else start no two runs in one folder"
        return [found, warn("locks", f"{read.folder} does not lock files", advice)]
    return [found]
