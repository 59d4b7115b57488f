"""Network cards of a host, and variables of NCCL and gloo that contradict them."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from app.cli.host_checks.finding import CheckResult, fail, ok, skip, warn

SIOCGIFADDR = 0x8915  # ioctl of Linux: IPv4 address of an interface
TESTED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE")
TURNED_OFF = {
    "NCCL_P2P_DISABLE": "GPUs of a node would copy through host memory",
    "NCCL_SHM_DISABLE": "GPUs of a node without peer access would use the network",
    "NCCL_NVLS_ENABLE=0": "NVLink SHARP would not reduce",
}


@dataclass(frozen=True, slots=True)
class Network:
    """Interfaces and InfiniBand or RoCE ports of a host."""

    interfaces: Mapping[str, float | None]  # that are up -> Gb/s; None: not known
    cards: Mapping[str, float]  # active ports of RDMA cards, as name:port -> Gb/s
    down: tuple[str, ...] = ()  # ports of RDMA cards that are not active
    gpu_direct: bool | None = None  # nvidia_peermem is loaded; None without RDMA cards


def read_network(sys: Path = Path("/sys")) -> Network:
    """Return what Linux's /sys says."""
    interfaces = {}
    for path in sorted((sys / "class/net").glob("*")):
        if _line(path / "operstate") in ("up", "unknown"):
            speed = _line(path / "speed")
            known = re.fullmatch(r"[1-9]\d*", speed) is not None
            interfaces[path.name] = int(speed) / 1000 if known else None
    cards, down = {}, []
    for port in sorted((sys / "class/infiniband").glob("*/ports/*")):
        name = f"{port.parts[-3]}:{port.name}"
        rate = re.match(r"[\d.]+", _line(port / "rate"))
        if _line(port / "state").endswith("ACTIVE") and rate:
            cards[name] = float(rate[0])
        else:
            down.append(name)
    direct = (sys / "module/nvidia_peermem").exists() if cards else None
    return Network(interfaces, cards, tuple(down), direct)


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # absent, or an interface without a speed
        return ""


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of a network interface; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(packed[20:24])


def own_address(env: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the address at which gloo listens on this host, and where it is from."""
    if names := env.get("GLOO_SOCKET_IFNAME"):
        name = names.split(",")[0]
        return interface_address(name), f"GLOO_SOCKET_IFNAME={name}"
    name = socket.gethostname()
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0]), f"host name {name}"
    except OSError:
        return None, f"host name {name}"


def judge_network(read: Network, env: Mapping[str, str], gpus: int) -> list[CheckResult]:
    """Return the findings; `gpus` counts those of this host."""
    return [_cards(read), *_direct(read, gpus), *judge_variables(read, env, gpus)]


def _cards(read: Network) -> CheckResult:
    if read.cards:
        speeds = sorted(set(read.cards.values()))
        told = f"{len(read.cards)} RDMA ports of {'/'.join(f'{each:g}' for each in speeds)} Gb/s"
        if len(speeds) > 1 or read.down:
            told += f", not active: {', '.join(read.down)}" if read.down else ""
            advice = "check cables and switch ports (ibstat); NCCL_IB_HCA=… leaves ports out"
            return warn("network", told, advice)
        return ok("network", told)
    known = {name: speed for name, speed in read.interfaces.items() if name != "lo"}
    told = ", ".join(
        f"{name} {f'{speed:g} Gb/s' if speed else 'of unknown speed'}"
        for name, speed in known.items()
    )
    if not known:
        return skip("network", "only loopback: one host alone")
    return ok("network", f"no RDMA; {told}")


def _direct(read: Network, gpus: int) -> Iterator[CheckResult]:
    if not gpus or read.gpu_direct is None:
        return
    if read.gpu_direct:
        yield ok("GPUDirect", "nvidia_peermem is loaded")
    else:
        advice = "modprobe nvidia_peermem, unless NCCL_DEBUG=INFO says GDRDMA (DMA-BUF) without it"
        yield warn("GPUDirect", "nvidia_peermem is not loaded", advice)


def judge_variables(read: Network, env: Mapping[str, str], gpus: int) -> list[CheckResult]:
    """Return findings on variables of NCCL, gloo and CUDA that this host contradicts."""
    found = [*_names(read, env), *_switches(read, env, gpus)]
    if found:
        return found
    given = sorted(name for name in env if name.startswith(("NCCL_", "GLOO_")))
    return [ok("variables", ", ".join(given) or "none of NCCL_… or GLOO_… is set")]


def _names(read: Network, env: Mapping[str, str]) -> Iterator[CheckResult]:
    there = ", ".join(read.interfaces) or "none"
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        text = env.get(variable, "")
        exact = variable.startswith("GLOO") or text.startswith("=")
        if text and not text.startswith("^") and not _matches(text, read.interfaces, exact):
            advice = f"name one of {there}, or unset it"
            yield fail("variables", f"{variable}={text} is no interface that is up here", advice)
    text = env.get("NCCL_IB_HCA", "")
    if text and not text.startswith("^") and not _is_card(text, read.cards):
        there = ", ".join(read.cards) or "none"
        yield fail("variables", f"NCCL_IB_HCA={text} names no active card", f"name one of {there}")


def _matches(text: str, names: Mapping[str, object], exact: bool) -> bool:
    """Return whether a list of interfaces finds one: NCCL takes beginnings of names, gloo names."""
    words = text.removeprefix("=").split(",")
    return any(name == word if exact else name.startswith(word) for name in names for word in words)


def _is_card(text: str, cards: Mapping[str, object]) -> bool:
    words = text.removeprefix("=").split(",")
    for card in cards:
        for word in words:
            whole = card if ":" in word else card.split(":")[0]
            if whole == word or (not text.startswith("=") and whole.startswith(word)):
                return True
    return False


def _switches(read: Network, env: Mapping[str, str], gpus: int) -> Iterator[CheckResult]:
    if env.get("NCCL_IB_DISABLE") == "1" and read.cards:
        advice = "unset it: NCCL would use sockets, several times slower"
        yield warn("variables", "NCCL_IB_DISABLE=1, and this host has RDMA cards", advice)
    for switch, effect in TURNED_OFF.items():
        name, _, value = switch.partition("=")
        if gpus > 1 and env.get(name) == (value or "1"):
            yield warn("variables", f"{name}={env[name]}: {effect}", f"unset {name}")
    if left := [name for name in TESTED if env.get(name)]:
        told = ", ".join(f"{name}={env[name]}" for name in left)
        yield warn("variables", told, "unset them: NCCL chooses better by itself, call by call")
    if env.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield warn("variables", f"NCCL_DEBUG={env['NCCL_DEBUG']}", "set WARN: pages per rank")
    if env.get("CUDA_LAUNCH_BLOCKING") == "1":
        advice = "unset it: every kernel waits, for debugging only"
        yield warn("variables", "CUDA_LAUNCH_BLOCKING=1", advice)


def is_loopback(address: str) -> bool:
    """Return whether an address is reached from its own host only."""
    return ip_address(address).is_loopback
