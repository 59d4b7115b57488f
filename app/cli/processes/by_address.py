"""Rendezvous of torchrun's agents on several hosts by --master-addr and --node-rank.

torch's own waits for the other nodes in C++, where no signal is handled, and silently.
"""

from __future__ import annotations

import time

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from app.cli.processes.waiting import announced, missing_nodes, not_come, wait_for_first_node
from app.engine.ranks.meeting import POLL_S, join_store, keep_store

BACKEND = "by-address"  # its name for torchrun's --rdzv-backend, in place of static
TIMEOUT_S = 600  # unless --rdzv-conf=timeout=…
KEEPER_ENDED = "the launcher of rank 0 has ended"
HERE = "graphfold/here"  # prefix of the keys of nodes that have come


class ByAddress(StaticTCPRendezvous):
    """torch's static rendezvous, which a signal ends while it waits."""

    @classmethod
    def create(cls, parameters: RendezvousParameters) -> ByAddress:
        """Build it from torchrun's settings, with the node's rank among --rdzv-conf."""
        host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        rank = parameters.get_as_int("rank")
        assert rank is not None, "the launcher gives it"
        timeout = parameters.get_as_int("timeout", TIMEOUT_S) or TIMEOUT_S
        nodes, run_id = parameters.max_nodes, parameters.run_id
        return cls(host, port, rank, world_size=nodes, run_id=run_id, timeout=timeout)

    def get_backend(self) -> str:
        """Return the name of this backend."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet all nodes, the first time. Raises OwnError if another program has the address, and
        RendezvousError if some do not come.
        """
        if self._store is None:
            self._store = self._meet()
        return super().next_rendezvous()

    def _meet(self) -> Store:
        deadline = time.monotonic() + self.timeout.total_seconds()
        address = (self.master_addr, self.master_port)
        missing = "the node"
        with announced(lambda: f"{missing} at {address[0]}:{address[1]}"):
            if self.rank:
                wait_for_first_node(*address, self.timeout)
            store = join_store(*address) if self.rank else keep_store(*address)
            store.set_timeout(self.timeout)
            here = PrefixStore(f"{HERE}/{self.run_id}", store)
            try:
                here.set(str(self.rank), "")
                while away := [n for n in range(self.world_size) if not here.check([str(n)])]:
                    missing = missing_nodes(len(away), self.world_size)
                    if time.monotonic() > deadline:
                        raise RendezvousTimeoutError(not_come(missing, self.timeout))
                    time.sleep(POLL_S)
            except RuntimeError:
                raise RendezvousConnectionError(KEEPER_ENDED) from None
        return store
