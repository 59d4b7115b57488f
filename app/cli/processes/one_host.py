"""Rendezvous of torchrun on one host: a key-value store that other hosts cannot reach.

torch's own rendezvous listens on all network interfaces and unpickles what it finds in its store,
so anyone who reaches the port could run code as this user.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from app.engine.ranks.address import LOOPBACK
from app.engine.ranks.meeting import keep_store

BACKEND = "one-host"  # its name for torchrun's --rdzv-backend


class OneHost(RendezvousHandler):
    """Rendezvous of a single launcher, which hosts its ranks' store on the loopback address."""

    def __init__(self, port: int, run_id: str) -> None:
        self._store = keep_store(LOOPBACK, port)
        self._run_id = run_id

    @classmethod
    def create(cls, parameters: RendezvousParameters) -> OneHost:
        """Build it from torchrun's settings. Raises ConfigError if another program has the port."""
        _, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        return cls(port, parameters.run_id)

    def get_backend(self) -> str:
        """Return the name of this backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use the launcher's store, at MASTER_ADDR and MASTER_PORT."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, and this launcher as rank 0 of 1."""
        store = dist.PrefixStore(self._run_id, self._store)
        address = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(store, rank=0, world_size=1, bootstrap_store_info=address)

    def is_closed(self) -> bool:
        """False: the rendezvous stays until the launcher ends."""
        return False

    def set_closed(self) -> None:
        """No-op: there is no other launcher to notify."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other launcher can join."""
        return 0

    def get_run_id(self) -> str:
        """Return torchrun's id of this launch."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True without closing the store, which ends with the launcher."""
        return True
