"""Measurements of `app.cli.calibrate`, and the hardware option written from them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.cli.processes.launcher import Launch
from app.engine.calibration.clock import Clock
from app.engine.calibration.fp8 import experts_speeds, fp8_speeds
from app.engine.calibration.kernels import MeasuredSizes, kernel_speeds
from app.engine.calibration.links import link_speeds
from app.engine.calibration.profile_file import measured_profile, write_profile
from app.engine.files.attempt import Attempt
from app.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Measured:
    """The GPU that a process measures."""

    device: torch.device
    name: str  # as the driver reports it
    memory_gib: float
    libraries: str
    backend: str  # of collectives
    sizes: MeasuredSizes


def gpu_of(launch: Launch) -> Measured:
    """The GPU of this process. Raises ConfigError."""
    if not torch.cuda.is_available():
        raise ConfigError("device", "cpu", "this host has no usable GPU to measure")
    count = torch.cuda.device_count()
    if launch.local_rank >= count or (launch.one_host and (launch.world_size or 1) > count):
        rule = f"are more than this host's GPUs: it has {count}"
        raise ConfigError("processes", launch.world_size, rule, nearest=count)
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Measured(
        device,
        torch.cuda.get_device_name(device),
        memory_gib=torch.cuda.get_device_properties(device).total_memory / GIB,
        libraries=f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}",
        backend="nccl",
        sizes=MeasuredSizes(),
    )


def measure(launch: Launch, option_path: Callable[[str], Path]) -> None:
    """Measure the GPU and write the option to `option_path(GPU name)`. Raises ConfigError."""
    gpu = gpu_of(launch)
    path = option_path(gpu.name)
    began = time.monotonic()
    clock = Clock(gpu.device)
    links: dict[str, float] = {}
    if (launch.world_size or 1) > 1:
        if not launch.one_host:
            rule = "are on several hosts, but calibrate measures the links inside one host"
            advice = "torchrun --standalone --nproc-per-node N -m app.cli.calibrate"
            raise ConfigError("processes", launch.world_size, rule, advice=advice)
        links = _links(clock, launch, gpu)
    if launch.rank == 0:
        speeds: dict[str, Any] = kernel_speeds(clock, gpu.sizes)
        in_fp8, missing = fp8_speeds(clock, gpu.sizes.square, speeds)
        of_experts, missing_of_experts = experts_speeds(clock, gpu.sizes, speeds)
        speeds |= in_fp8 | of_experts
        profile = measured_profile(gpu.name, _source(gpu), speeds, links)
        _write(path, profile, gpu.name, gpu.memory_gib)
        for why in missing:
            print(f"GEMMs in FP8 are not measured for the recipe {why}")
        for why in missing_of_experts:
            print(f"GEMMs in FP8 are not measured {why}")
        took = time.monotonic() - began
        print(f"written in {took:.0f} s: {path}; plan with hardware={path.stem}")


def _links(clock: Clock, launch: Launch, gpu: Measured) -> dict[str, float]:
    """Measure the links between the GPUs of this host. All processes call it."""
    attempt = Attempt(launch.requeues, launch.master, store_stays=launch.agent_store)
    assert launch.world_size is not None
    store = attempt.meeting_store(launch.rank, launch.world_size)
    dist.init_process_group(
        gpu.backend, store=store, rank=launch.rank, world_size=launch.world_size
    )
    group = dist.group.WORLD
    assert group is not None
    found = link_speeds(clock, group, gpu.sizes.sent)
    dist.destroy_process_group()
    return found


def _source(gpu: Measured) -> str:
    """Return the profile's `source`: date, host and versions of libraries."""
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"measured {when} on {platform.node()}: {gpu.libraries}"


def _write(path: Path, profile: Any, device_name: str, memory_gib: float) -> None:
    try:
        write_profile(path, profile, device_name, memory_gib)
    except OSError as error:
        raise ConfigError("out", path, f"cannot be written: {error.strerror}") from error
