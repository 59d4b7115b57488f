"""Checks of torchrun's own arguments, so that a mistake costs one line that names the argument."""

from __future__ import annotations

import socket
import time
from argparse import ArgumentError, Namespace
from collections.abc import Sequence

from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import (
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from app.errors import OwnError, nearest

STATIC, C10D = "static", "c10d"
BACKENDS = (STATIC, C10D, "etcd", "etcd-v2")  # torch's own
# their ports, unless one is given
PORTS = {STATIC: 29_500, C10D: 29_400}
DEVICES = ("gpu", "cpu", "xpu", "auto")  # --nproc-per-node for as many processes
RESOLVE_S = 4.0  # seconds in which a name may begin to resolve: a host may start before its DNS
POLL_S = 0.5  # seconds between attempts to resolve it


def parsed(arguments: Sequence[str]) -> Namespace:
    """Return torchrun's options. Raises OwnError for a value of another type; SystemExit for --help
    and unknown options.
    """
    parser = get_args_parser()
    parser.exit_on_error = False  # else a page of usage
    try:
        return parser.parse_args(arguments)
    except ArgumentError as error:
        key = (error.argument_name or "arguments").partition("/")[0]
        rule, _, value = error.message.partition(": ")
        raise OwnError(key, value.strip("'"), rule) from None


def check_options(options: Namespace) -> None:
    """Raise OwnError, which names the argument, for values that torch would refuse later or not at
    all.
    """
    most = _check_nodes(options.nnodes)
    _check_processes(options.nproc_per_node)
    if options.standalone and most > 1:
        raise OwnError("--nnodes", options.nnodes, "must be 1 with --standalone")
    if options.max_restarts < 0:
        raise OwnError("--max-restarts", options.max_restarts, "must be at least 0")
    backend = options.rdzv_backend
    known = {*BACKENDS, *rendezvous_handler_registry._registry}  # with those of plugins
    if backend not in known:
        rule = f"must be one of {', '.join(BACKENDS)}"
        raise OwnError("--rdzv-backend", backend, rule, guess=nearest(backend, BACKENDS))
    if backend == STATIC and not 0 <= options.node_rank < most:
        rule = f"must be 0 to {most - 1}" if most > 1 else "must be 0: there is one node"
        raise OwnError("--node-rank", options.node_rank, rule)


def meeting_point(options: Namespace) -> tuple[str, int]:
    """Return host and port at which launchers meet; port 0 on one host if none is given. Raises
    OwnError.
    """
    several = parse_min_max_nnodes(options.nnodes)[1] > 1
    default = PORTS.get(options.rdzv_backend, 0) if several else 0
    if not options.rdzv_endpoint:
        return options.master_addr, options.master_port or default
    try:
        host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=default)
    except ValueError:
        rule = "must be a host, or HOST:PORT with a port of 1 to 65535"
        raise OwnError("--rdzv-endpoint", options.rdzv_endpoint, rule) from None
    return host, port


def check_name(options: Namespace, host: str) -> None:
    """Raise OwnError if the name of the host at which launchers meet does not resolve here, which
    torch would try for more than a minute.
    """
    deadline = time.monotonic() + RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                given = options.rdzv_endpoint
                key, value = ("--rdzv-endpoint", given) if given else ("--master-addr", host)
                rule = f"the name does not resolve on this host ({error.strerror})"
                advice = "give the first node's address, or a name that every node resolves"
                raise OwnError(key, value, rule, advice=advice) from None
        time.sleep(POLL_S)


def _check_nodes(given: str) -> int:
    """Return the largest number of nodes. Raises OwnError."""
    try:
        least, most = parse_min_max_nnodes(given)
    except (ValueError, RuntimeError):
        raise OwnError("--nnodes", given, "must be a number or MIN:MAX") from None
    if least < 1:
        raise OwnError("--nnodes", given, "must be at least 1")
    if least > most:
        rule = "must be a number or MIN:MAX, and MIN is more than MAX"
        raise OwnError("--nnodes", given, rule, guess=f"{most}:{least}" if most > 0 else None)
    return int(most)


def _check_processes(given: str) -> None:
    key = "--nproc-per-node"
    try:
        count = determine_local_world_size(given)
    except ValueError:
        if given in DEVICES:
            rule, advice = f"this host has no usable {given.upper()}", "give a number of processes"
            raise OwnError(key, given, rule, advice=advice) from None
        rule = f"must be a number, or one of {', '.join(DEVICES)}"
        raise OwnError(key, given, rule, guess=nearest(given, DEVICES)) from None
    if count < 1:
        raise OwnError(key, given, "must be at least 1")
