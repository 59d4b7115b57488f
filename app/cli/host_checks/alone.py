"""All checks of this host alone, and what ranks of other hosts compare it with."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from app.cli.host_checks.collectives import HostLinks
from app.cli.host_checks.finding import CheckResult, fail
from app.cli.host_checks.host import (
    host_identity,
    judge_host,
    judge_storage,
    read_host,
    read_storage,
)
from app.cli.host_checks.network import interface_address, judge_network, own_address, read_network
from app.cli.host_checks.nodes import Node
from app.cli.host_checks.nvidia import Gpus, judge_gpus, read_gpus
from app.cli.processes.launcher import Launch
from app.version import Version


def read_all(run_dir: Path, env: Mapping[str, str], launch: Launch) -> Node:
    """Check this host; only its first rank does, the others just say where they are."""
    name = env.get("SLURMD_NODENAME") or socket.gethostname()
    ours = launch.network()  # set by this program itself, for ranks of one host
    given = {key: text for key, text in env.items() if ours.get(key) != text}
    gpus, network = read_gpus(), read_network()
    if gpus is not None and env.get("CUDA_VISIBLE_DEVICES") == "":
        gpus = None  # a run would use the CPU
    count = len(gpus.gpus) if gpus is not None else 0
    address, source = own_address(env)
    used = [each for each in network.interfaces if interface_address(each) == address]
    storage = read_storage(run_dir)
    found: list[CheckResult] = []
    if launch.local_rank == 0:
        built_for = torch.version.cuda if gpus is not None or not hidden(env) else None
        found = [
            *judge_gpus(gpus, built_for),
            *_usable(gpus),
            *judge_host(read_host(torch.__version__), count, rdma=bool(network.cards)),
            *judge_network(network, given, count),
            *judge_storage(storage),
        ]
    return Node(
        launch,
        name,
        address,
        source,
        facts=_facts(gpus),
        links=HostLinks.of(gpus, network, used[0] if used else None),
        folder=storage.folder,
        findings=tuple(replace(each, host=name) for each in found),
        identity=host_identity(name),
    )


def hidden(env: Mapping[str, str]) -> bool:
    """Return whether GPUs are hidden on purpose."""
    return env.get("CUDA_VISIBLE_DEVICES") == ""


def _usable(gpus: Gpus | None) -> list[CheckResult]:
    """Return a finding if the driver has GPUs that torch cannot use."""
    if gpus is None or not gpus.gpus or torch.version.cuda is None or torch.cuda.is_available():
        return []
    try:
        torch.cuda.init()
        told = "no GPU that torch can use"
    except (RuntimeError, AssertionError) as error:
        told = str(error).splitlines()[0][:200]
    advice = "error 802: start nvidia-fabricmanager; otherwise update the driver or restart"
    return [fail("CUDA", told, advice)]


def _facts(gpus: Gpus | None) -> dict[str, str]:
    """Return what hosts of one run must, or should, have in common."""
    found = {
        "graphfold": Version.of().short,
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    if gpus is not None and gpus.gpus:
        names = [each.name for each in gpus.gpus]
        found["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
        found["driver"] = gpus.gpus[0].driver
        if torch.cuda.is_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
