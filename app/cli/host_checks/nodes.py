"""Checks of several hosts together: reachable ports, clocks, equal software, collectives."""

from __future__ import annotations

import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from app.cli.host_checks.collectives import HostLinks, expected_gb_s, judge_speed, measure
from app.cli.host_checks.finding import CheckResult, fail, ok, skip, warn
from app.cli.host_checks.network import is_loopback
from app.cli.processes.launcher import Launch
from app.engine.files.attempt import Attempt
from app.engine.ranks.meeting import join_store, keep_store

MEET_S = 45.0  # for all ranks to come
TALK_S = 60.0  # for all collectives together
LEAVE_S = 5.0  # for all ranks to read the last result
CONNECT_S = 5.0
SKEW_S = 1.0  # between clocks of hosts
PORTS = "open all TCP ports between the nodes (firewall, security group, NetworkPolicy)"
EQUAL = {  # facts that must be equal on all hosts -> what to do otherwise
    "graphfold": "install the same version on all nodes",
    "torch": "install the same torch on all nodes: constraints.txt names one",
    "NCCL": "use the same NCCL on all nodes: no LD_LIBRARY_PATH with another one",
    "CUDA": "install the same torch on all nodes",
}
ALIKE = {  # facts that should be
    "Python": "install the same Python on all nodes",
    "driver": "update the drivers to one version",
    "GPUs": "take nodes of one kind: --constraint, --partition",
}


@dataclass(frozen=True, slots=True)
class Node:
    """One rank's view of its host."""

    launch: Launch
    name: str
    address: str | None  # where gloo listens on this host
    source: str  # what the address is from
    facts: Mapping[str, str]  # of EQUAL and ALIKE
    links: HostLinks
    folder: Path  # where runs are written
    findings: tuple[CheckResult, ...] = ()  # of the host alone; only its first rank has them
    identity: str = ""  # that ranks of one host share: names of hosts may be equal
    # prints what is known and ends the process: a collective may never return
    give_up: Callable[[list[CheckResult]], None] = field(default=lambda found: None)

    @property
    def leads(self) -> bool:
        """Return whether this is the first rank of its host."""
        return self.launch.local_rank == 0


class Unreachable(Exception):
    """No meeting: the finding says which rank or address does not answer."""

    def __init__(self, finding: CheckResult) -> None:
        super().__init__(finding.measured)
        self.finding = finding


def meeting(launch: Launch, seconds: float = MEET_S) -> dist.Store:
    """Return a store of all ranks. Raises Unreachable if its host does not answer in time, and
    OwnError if another program has the port.
    """
    assert launch.master is not None and launch.world_size is not None
    if launch.agent_store:
        attempt = Attempt(launch.requeues, launch.master, store_stays=True)
        return attempt.meeting_store(launch.rank, launch.world_size)
    host, port = launch.master
    if launch.rank == 0:
        return keep_store(host, port)
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), CONNECT_S).close()
            return join_store(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                told = f"{host}:{port} does not answer within {seconds:.0f} s: {error}"
                raise Unreachable(fail("rendezvous", told, PORTS)) from error
            time.sleep(0.2)


def together(node: Node, store: dist.Store, seconds: float = MEET_S) -> list[CheckResult]:
    """Make all checks that need several ranks; every rank calls it, and gets all findings: those of
    each host alone first.
    """
    world = node.launch.world_size
    assert world is not None
    with _Door(node) as door, _SharedFile(node) as shared:
        said = {
            "host": node.name,
            "identity": node.identity,
            "rank": node.launch.rank,
            "leads": node.leads,
            "address": node.address,
            "port": door.port,
            "shared": shared,
            "facts": dict(node.facts),
            "findings": [each.as_json() for each in node.findings],
        }
        everyone = _with_names(_shared(store, "facts", said, node.launch, seconds))
        alone = [CheckResult.from_json(each) for one in everyone for each in one["findings"]]
        leaders = _first_of_hosts(everyone)
        node = replace(node, name=everyone[node.launch.rank]["host"])
        checks = any(one["rank"] == node.launch.rank for one in leaders)
        mine = [*_reach(node, leaders), *_folder(node, leaders)] if checks else []
        parts = _shared(store, "ports", [each.as_json() for each in mine], node.launch, seconds)
    several = [CheckResult.from_json(each) for part in parts for each in part]
    found = [*alone, *_same(leaders), *_left_out(leaders), *several]
    if any(each.check == "ports" and each.state.value == "fail" for each in found):
        return [*found, skip("collectives", "not tried: ports are closed")]
    return [*found, *_collectives(node, store, len(leaders), before=found)]


def _with_names(everyone: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what all ranks say, with a name of its own for each host: those that share one get
    the number of their first rank.
    """
    first: dict[tuple[str, str], int] = {}
    for one in filter(lambda one: one["leads"], everyone):
        first.setdefault((one["host"], one["identity"]), one["rank"])
    names = [name for name, _ in first]
    named = []
    for one in everyone:
        host = one["host"]
        if one["leads"] and names.count(host) > 1:
            host = f"{host} of rank {first[host, one['identity']]}"
        findings = [{**each, "host": host} for each in one["findings"]]
        named.append({**one, "host": host, "findings": findings})
    return named


def _first_of_hosts(everyone: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first rank of each host: several launchers of one host have each a first rank."""
    first: dict[str, dict[str, Any]] = {}
    for one in filter(lambda one: one["leads"], everyone):
        first.setdefault(one["host"], one)
    return list(first.values())


def _left_out(leaders: list[dict[str, Any]]) -> list[CheckResult]:
    """Say which checks of several hosts are not made, and why."""
    if len(leaders) == 1:
        why = "not checked: all ranks are on one host"
        return [skip(check, why) for check in ("ports", "clocks", "shared folder")]
    if leaders[0]["shared"] is None:
        return [skip("shared folder", f"not checked: {leaders[0]['host']} writes none (storage)")]
    return []


def _shared(
    store: dist.Store, name: str, mine: object, launch: Launch, seconds: float
) -> list[Any]:
    """Return what every rank says, by rank. Raises Unreachable if one stays silent."""
    world = launch.world_size or 1
    deadline = time.monotonic() + seconds
    absent = set(range(world))
    try:
        store.set(f"{name}/{launch.rank}", json.dumps(mine))
        while absent := {rank for rank in absent if not store.check([f"{name}/{rank}"])}:
            if time.monotonic() > deadline:
                who = ", ".join(map(str, sorted(absent)))
                told = f"rank {who} has not come in {seconds:.0f} s"
                advice = f"look at those nodes (is the program there?); {PORTS}"
                raise Unreachable(fail("rendezvous", told, advice))
            time.sleep(0.05)
        return [json.loads(store.get(f"{name}/{rank}")) for rank in range(world)]
    except dist.DistError as error:
        told = "rank 0, which keeps the store, has ended"
        raise Unreachable(fail("rendezvous", told, "look at its output")) from error


def leave(store: dist.Store, launch: Launch) -> None:
    """Wait, in rank 0, until the other ranks have read everything: the store ends with it."""
    with suppress(Unreachable):
        if launch.rank == 0:
            _shared(store, "done", True, launch, LEAVE_S)
        else:
            store.set(f"done/{launch.rank}", "true")


class _Door:
    """A port of this host that answers with the time of its clock; only of the first rank."""

    def __init__(self, node: Node) -> None:
        self._listener = socket.create_server(("", 0)) if node.leads else None
        self.port = self._listener.getsockname()[1] if self._listener else 0

    def __enter__(self) -> _Door:
        if self._listener is not None:
            threading.Thread(target=self._answer, args=(self._listener,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()

    @staticmethod
    def _answer(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the checks are over
                return
            with connection:
                connection.sendall(f"{time.time():.6f}\n".encode())


class _SharedFile:
    """A file that rank 0 writes beside the run folder, for the others to see: its path, or None."""

    def __init__(self, node: Node) -> None:
        name = f".graphfold-doctor-{node.name}-{os.getpid()}"
        self._path = node.folder / name if node.launch.rank == 0 else None

    def __enter__(self) -> str | None:
        try:
            if self._path is not None:
                self._path.touch()
        except OSError:  # `storage` has said so
            self._path = None
        return None if self._path is None else str(self._path)

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _on(host: str, found: CheckResult) -> CheckResult:
    return CheckResult(found.check, found.state, found.measured, advice=found.advice, host=host)


def _reach(node: Node, leaders: list[dict[str, Any]]) -> list[CheckResult]:
    """Connect to the first rank of every other host; compare clocks."""
    others = [each for each in leaders if each["host"] != node.name]
    if not others:
        return []  # as `_left_out` says
    if node.launch.one_host:
        told = "not checked: the launcher lets all ranks meet at a loopback address"
        return [_on(node.name, skip(check, told)) for check in ("ports", "clocks")]
    explicit = node.source.startswith("GLOO")
    if node.address is None or (is_loopback(node.address) and not explicit):
        told = f"{node.source} means {node.address or 'no address'}: other nodes cannot use it"
        advice = "export GLOO_SOCKET_IFNAME=… on every node; `ip -brief address` lists interfaces"
        return [_on(node.name, fail("ports", told, advice))]
    skews, slowest, found = [0.0], 0.0, []
    for other in others:
        where = f"{other['address']}:{other['port']} of {other['host']}"
        try:
            skew, took = _clock_of(other["address"], other["port"])
        except (OSError, TypeError, ValueError) as error:
            told = f"{where} does not answer: {error}"
            found.append(_on(node.name, fail("ports", told, PORTS)))
            continue
        skews.append(skew)
        slowest = max(slowest, took)
    if found:
        return found
    worst = max(skews, key=abs)
    reached = ok("ports", f"{len(others)} other hosts answer within {slowest * 1e3:.1f} ms")
    if abs(worst) > SKEW_S:
        advice = "start chrony or ntpd on all nodes: logs, leases and file times would disagree"
        clock = warn("clocks", f"differ by {abs(worst):.1f} s", advice)
    else:
        clock = ok("clocks", f"equal within {max(abs(worst), 0.001) * 1e3:.0f} ms")
    return [_on(node.name, reached), _on(node.name, clock)]


def _clock_of(address: str, port: int) -> tuple[float, float]:
    """Return by how many seconds a host's clock is ahead, and the seconds its answer took."""
    began, clock = time.monotonic(), time.time()
    with socket.create_connection((address, port), CONNECT_S) as connection:
        text = connection.makefile().readline()
    took = time.monotonic() - began
    return float(text) - (clock + took / 2), took


def _folder(node: Node, leaders: list[dict[str, Any]]) -> list[CheckResult]:
    """Look for the file that rank 0 has written beside the run folder."""
    path = leaders[0]["shared"]
    if len(leaders) < 2 or node.launch.rank == 0 or path is None:
        return []  # the host that writes, or `_left_out` says why
    if (node.folder / Path(path).name).exists():
        return [_on(node.name, ok("shared folder", f"sees what {leaders[0]['host']} writes"))]
    told = f"{node.folder} lacks what {leaders[0]['host']} writes to {Path(path).parent}"
    advice = "run_dir must be on a file system that all nodes share"
    return [_on(node.name, fail("shared folder", told, advice))]


def _same(leaders: list[dict[str, Any]]) -> list[CheckResult]:
    """Compare software and GPUs of the hosts."""
    found = []
    for name, advice in {**EQUAL, **ALIKE}.items():
        seen: dict[str, list[str]] = {}
        for each in leaders:
            seen.setdefault(each["facts"].get(name, "none"), []).append(each["host"])
        if len(seen) > 1:
            told = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in seen.items())
            found.append((fail if name in EQUAL else warn)(f"same {name}", told, advice))
    if not found and len(leaders) > 1:
        found.append(ok("same software", f"on {len(leaders)} hosts"))
    return found


def _collectives(
    node: Node, store: dist.Store, hosts: int, *, before: list[CheckResult]
) -> list[CheckResult]:
    """Time all-reduces; if they do not end in time, report and end this process."""
    world = node.launch.world_size or 1
    expected = expected_gb_s(node.links, hosts, world // max(1, hosts))

    def late() -> None:
        advice = "NCCL_DEBUG=INFO says what it waits for; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose"
        told = f"no end within {TALK_S:.0f} s over {'NCCL' if node.links.gpus else 'gloo'}"
        node.give_up([*before, fail("collectives", told, advice)])

    guard = threading.Timer(TALK_S, late)
    guard.daemon = True
    guard.start()
    backend = "nccl" if node.links.gpus else "gloo"
    limit = datetime.timedelta(seconds=TALK_S + 30)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=node.launch.rank,
            world_size=world,
            timeout=limit,
        )
        latency_us, gb_s = measure(node.launch.local_rank, backend)
        dist.destroy_process_group()
    except RuntimeError as error:
        told = f"{backend}: {str(error).splitlines()[0][:200]}"
        node.give_up([*before, fail("collectives", told, "NCCL_DEBUG=INFO says more; " + PORTS)])
        raise
    finally:
        guard.cancel()
    return judge_speed(backend, latency_us, gb_s, expected=expected, hosts=hosts)
