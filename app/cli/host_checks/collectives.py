"""All-reduces over all ranks, timed and held against the links that carry them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from app.cli.host_checks.finding import CheckResult, fail, ok, skip, warn
from app.cli.host_checks.network import Network
from app.cli.host_checks.nvidia import Gpus

LARGE = {"nccl": 256 * 2**20, "gloo": 16 * 2**20}  # bytes of the all-reduce that is bandwidth
SMALL = 8  # bytes of the one that is latency
TIMES = {"nccl": 20, "gloo": 4}
TRIES = 50
# µs that a small all-reduce may take: on one host, between hosts; twice what healthy ones do
PATIENCE_US = {"nccl": (150.0, 400.0), "gloo": (5_000.0, 10_000.0)}
FAIR, POOR = 0.6, 0.25  # shares of the expected bandwidth: below the first warn, the second fail
GLOO_GB_S = 1.0  # what gloo's thread of one rank moves at most, GB/s


@dataclass(frozen=True, slots=True)
class HostLinks:
    """Links and library of a collective."""

    gpus: bool  # whether ranks compute on GPUs, and NCCL sends
    gpu_gb_s: float | None  # one direction of a GPU's links inside the host; None: not known
    card_gb_s: float | None  # of the fastest RDMA port, or of the network interface otherwise
    cards: int = 1

    @classmethod
    def of(cls, gpus: Gpus | None, network: Network, interface: str | None) -> HostLinks:
        """Return the links; `interface` is the one that sockets use, None if not known."""
        speeds: list[float] = [*network.cards.values()]
        if not speeds:
            named = network.interfaces.get(interface or "")
            speeds = [named] if named else []
        on_gpus = gpus is not None and bool(gpus.gpus)
        return cls(
            gpus=on_gpus,
            gpu_gb_s=gpus.link_gb_s if gpus is not None and on_gpus else None,
            card_gb_s=max(speeds) / 8 if speeds else None,
            cards=max(1, len(network.cards)),
        )


def expected_gb_s(links: HostLinks, hosts: int, ranks_per_host: int) -> float | None:
    """Return the bus bandwidth of a large all-reduce that the links allow, GB/s; None: not known.

    Bus bandwidth as nccl-tests define it: 2 (n - 1) / n times the bytes per second, which is what
    the slowest link carries in a ring.
    """
    if hosts == 1:
        return links.gpu_gb_s if links.gpus else None  # gloo on one host: memory, no link
    if links.card_gb_s is None:
        return None
    if not links.gpus:
        return min(links.card_gb_s, GLOO_GB_S)
    between = links.card_gb_s * min(links.cards, ranks_per_host)
    inside = links.gpu_gb_s if ranks_per_host > 1 else None
    return between if inside is None else min(between, inside)


def measure(local_rank: int, backend: str) -> tuple[float, float]:
    """Return latency in µs and bus bandwidth in GB/s of all-reduces over the default group.

    Raises RuntimeError if a sum is wrong, or as torch.distributed does.
    """
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    small = torch.ones(SMALL // 4, device=device)
    large = torch.ones(LARGE[backend] // 4, device=device)
    ranks = dist.get_world_size()
    dist.all_reduce(large)
    if not bool((large == ranks).all()):
        raise RuntimeError(f"an all-reduce of ones over {ranks} ranks has a wrong sum")
    latency = _timed(small, TRIES) * 1e6
    large.fill_(0.0)
    seconds = _timed(large, TIMES[backend])
    return latency, 2 * (ranks - 1) / ranks * LARGE[backend] / seconds / 1e9


def _timed(tensor: torch.Tensor, times: int) -> float:
    """Return the mean seconds of an all-reduce."""
    dist.all_reduce(tensor)
    _wait(tensor)
    began = time.monotonic()
    for _ in range(times):
        dist.all_reduce(tensor)
    _wait(tensor)
    return (time.monotonic() - began) / times


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def judge_speed(
    backend: str, latency_us: float, gb_s: float, *, expected: float | None, hosts: int
) -> list[CheckResult]:
    """Return the findings on measured all-reduces."""
    most = PATIENCE_US[backend][hosts > 1]
    told = f"{backend} all-reduce of {SMALL} bytes: {latency_us:.0f} µs"
    advice = "look for busy cores, another job on the link, or sockets in place of RDMA"
    slow = warn("latency", f"{told}, more than {most:.0f}", advice)
    quick = ok("latency", told)
    return [quick if latency_us <= most else slow, _bandwidth(backend, gb_s, expected)]


def _bandwidth(backend: str, gb_s: float, expected: float | None) -> CheckResult:
    told = f"{backend} all-reduce of {LARGE[backend] >> 20} MiB: {gb_s:.3g} GB/s"
    if expected is None:
        return skip("bandwidth", f"{told}; not judged: the speed of the links is not known")
    told += f" of {expected:.3g} that the links allow"
    if backend == "nccl":
        advice = "NCCL_DEBUG=INFO names the transport: NET/IB and GDRDMA, or P2P/NVLink, are wanted"
    else:
        advice = "GLOO_SOCKET_IFNAME=… chooses a faster interface"
    if gb_s < POOR * expected and backend == "nccl":
        return fail("bandwidth", told, advice)
    return warn("bandwidth", told, advice) if gb_s < FAIR * expected else ok("bandwidth", told)
