"""Measure what this machine's GPUs reach, for planned times: `python -m app.cli.calibrate`.

Exit codes: 0, 2 for a mistake, which costs one line.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.cli.processes.ctrl_c import stop_quietly
from app.cli.processes.environment import environment

if __name__ == "__main__":
    # the imports take seconds
    stop_quietly("calibrate", speak=environment().get("RANK", "0") == "0")

import torch
import torch.distributed as dist

from app.cli.processes.home import CONF, user_conf
from app.cli.processes.launcher import Launch
from app.cli.processes.use_model import run_program
from app.engine.calibration.clock import Clock
from app.engine.calibration.eight_bits import eight_bits_speeds
from app.engine.calibration.kernels import MeasuredSizes, kernel_speeds
from app.engine.calibration.links import link_speeds
from app.engine.calibration.profile_file import gpu_words, measured_profile, write_profile
from app.engine.run.attempt import Attempt
from app.errors import ConfigError, nearest

OWN = ("name=", "out=")
GIB = 2**30
HELP = """\
== Graphfold: measure what GPUs, their host and their links reach, for planned times ==
Usage:  python -m app.cli.calibrate [name=NAME] [out=FOLDER]
        torchrun --nproc-per-node N -m app.cli.calibrate [...]   links between N GPUs too

  name=NAME    of the option: hardware=NAME; default: the GPU's name with _here behind it
  out=FOLDER   where hardware/NAME.yaml goes; default: ~/.config/graphfold, whose options train.py
               and the plan command find by themselves; others by --config-dir FOLDER

Takes a minute or two on an idle GPU. What is measured, and how times come of it:
docs/step-time.md. Plan with it: python -m app.cli.plan hardware=NAME ..."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a process measures on."""

    device: torch.device
    name: str  # as its driver reports it
    memory_gib: float
    libraries: str
    backend: str  # of collectives
    sizes: MeasuredSizes


def gpu_of(launch: Launch) -> Measured:
    """The GPU of this process. Raises ConfigError."""
    if not torch.cuda.is_available():
        raise ConfigError("calibrate", "cpu", "there is no GPU here to measure")
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


def work(arguments: Sequence[str], launch: Launch) -> int:
    """Measure and write; the exit code."""
    typed = _parsed(arguments)
    gpu = gpu_of(launch)
    path = option_path(typed, gpu.name)
    began = time.monotonic()
    clock = Clock(gpu.device)
    links: dict[str, float] = {}
    if (launch.world_size or 1) > 1:
        if not launch.one_host:
            rule = "are on several hosts, and links are those inside of one"
            advice = "torchrun --standalone --nproc-per-node N -m app.cli.calibrate"
            raise ConfigError("processes", launch.world_size, rule, advice=advice)
        links = _links(clock, launch, gpu)
    if launch.rank == 0:
        speeds: dict[str, Any] = kernel_speeds(clock, gpu.sizes)
        in_eight_bits, missing = eight_bits_speeds(clock, gpu.sizes.square, speeds)
        speeds |= in_eight_bits
        profile = measured_profile(gpu.name, _source(gpu), speeds, links)
        _write(path, profile, gpu.name, gpu.memory_gib)
        for why in missing:
            print(f"products in eight bits are not measured by the recipe {why}")
        took = time.monotonic() - began
        print(f"written in {took:.0f} s: {path}; plan with hardware={path.stem}")
    return 0


def _parsed(arguments: Sequence[str]) -> dict[str, str]:
    """This command's options. Raises ConfigError."""
    for word in arguments:
        if not word.startswith(OWN):
            rule = f"the options are {' and '.join(OWN)}; --help explains them"
            key, _, value = word.partition("=")
            guess = nearest(f"{key}=", OWN)
            raise ConfigError("option", word, rule, guess=guess and f"{guess}{value}")
    return dict(word.split("=", 1) for word in arguments)


def option_path(typed: dict[str, str], device_name: str) -> Path:
    """Where the option goes. ConfigError for the name of one that is there already, and for what
    cannot be a name.
    """
    words = re.sub(r"[^a-z0-9-]+", "_", gpu_words(device_name).lower())
    name = typed.get("name", f"{words}_here")
    if not name.replace("_", "").replace("-", "").isalnum():
        rule = "is typed as hardware=NAME: letters, digits, _ and -"
        raise ConfigError("name", name, rule, nearest=f"{words}_here")
    if (CONF / "hardware" / f"{name}.yaml").exists():
        rule = "is an option of Graphfold's own"
        raise ConfigError("name", name, rule, nearest=f"{name}_here")
    return Path(typed["out"] if "out" in typed else user_conf()) / "hardware" / f"{name}.yaml"


def _links(clock: Clock, launch: Launch, gpu: Measured) -> dict[str, float]:
    """Over all processes, which are those of one node."""
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
    """When and with what."""
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"measured {when} on {platform.node()}: {gpu.libraries}"


def _write(path: Path, profile: Any, device_name: str, memory_gib: float) -> None:
    try:
        write_profile(path, profile, device_name, memory_gib)
    except OSError as error:
        raise ConfigError("out", path, f"cannot be written: {error.strerror}") from error


def main(arguments: Sequence[str], parent: int) -> int:
    """Run the command line of a process that process `parent` has started; the exit code."""
    return run_program("calibrate", HELP, arguments, parent=parent, work=work, bare=True)


def command(parent: int) -> None:
    """Run the command line; SystemExit with the exit code."""
    sys.exit(main(sys.argv[1:], parent))


if __name__ == "__main__":
    command(os.getppid())
