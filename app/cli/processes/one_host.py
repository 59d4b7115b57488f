"""torchrun's meeting point on one host: a key-value store that other hosts cannot reach.

torch's own rendezvous listens on all networks and unpickles what it finds in its store, so whoever
reaches it could run code as this user.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from app.engine.run.address import LOOPBACK
from app.engine.run.meeting import keep_store

BACKEND = "one-host"  # its name among torchrun's --rdzv-backend


class OneHost(RendezvousHandler):
    """The one launcher there is meets nobody; it keeps the store that its ranks meet in."""

    def __init__(self, port: int, run_id: str) -> None:
        self._store = keep_store(LOOPBACK, port)
        self._run_id = run_id

    @classmethod
    def create(cls, parameters: RendezvousParameters) -> OneHost:
        """From torchrun's settings; raises ConfigError where another program has the port."""
        _, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        return cls(port, parameters.run_id)

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks find the store at MASTER_ADDR and MASTER_PORT."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, and this launcher as the only one."""
        store = dist.PrefixStore(self._run_id, self._store)
        address = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(store, rank=0, world_size=1, bootstrap_store_info=address)

    def is_closed(self) -> bool:
        """It stays until the launcher ends."""
        return False

    def set_closed(self) -> None:
        """Nobody else is to be told."""

    def num_nodes_waiting(self) -> int:
        """No other launcher may come."""
        return 0

    def get_run_id(self) -> str:
        """What torchrun calls this launch."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with the launcher."""
        return True
