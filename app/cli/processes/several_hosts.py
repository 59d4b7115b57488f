"""Rendezvous of torchrun's agents on several hosts, which nodes may leave and join.

torch's own (2.11 to 2.13) publishes the address of the ranks' store only in its first round: a node
that joins in a later round waits for it until a timeout, and nodes that stay would keep that of a
node that is lost. Here ranks use the store of the rendezvous itself, whose address all know.
Nor does torch's agent notice a lost node while its own ranks wait for those of that node, and it
starts its ranks again and again for a second spare node.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    DEFAULT_PORT,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)

from app.cli.processes.waiting import announced, missing_nodes, not_come, wait_for_first_node

BACKEND = "several-hosts"  # its name for torchrun's --rdzv-backend, in place of c10d
# Seconds that a node may be missing: one that starts its ranks again leaves a round before it waits
# for the next one.
AWAY_S = 2.0
JOIN_S = 600  # seconds to wait for other nodes, unless --rdzv-conf=join_timeout=…


class SeveralHosts(DynamicRendezvousHandler):
    """torch's dynamic rendezvous, in which lost nodes are noticed and spare ones can join."""

    _members: frozenset[object] = frozenset()  # nodes of the last round
    _away: Mapping[object, float] = MappingProxyType({})  # those missing, since (monotonic clock)
    _endpoint = ""  # host and port at which the nodes meet, as given
    leaves = False  # this node ends, and the others start again without it

    @classmethod
    def create(cls, parameters: RendezvousParameters) -> SeveralHosts:
        """Build it from torchrun's settings. Raises RendezvousError without a connection."""
        if parameters.get("store_type", "tcp") == "tcp":
            _wait_for_store(parameters)
        backend, store = create_backend(parameters)
        made = create_handler(store, backend, parameters)
        own = cls(made._this_node, made._settings, backend.name, store, made._state_holder)
        own._endpoint = parameters.endpoint
        if isinstance(store, TCPStore):
            own._bootstrap_store_info = RendezvousStoreInfo(store.host, store.port)
            own._shared_tcp_store_server = store
        return own

    def get_backend(self) -> str:
        """Return the name of this backend."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, and remember its nodes. Raises RendezvousError."""
        while True:
            try:
                with announced(self._awaited):
                    info = super().next_rendezvous()
                break
            except RendezvousTimeoutError:
                if not self.spare:  # torch lets some of the nodes wait that find no room
                    said = not_come(self._missing() or "nodes", self._settings.timeout.join)
                    raise RendezvousTimeoutError(said) from None
        self._members = frozenset(self._state_holder.state.participants)
        return info

    def shutdown(self) -> bool:
        """End the run on all nodes, unless this one leaves it."""
        return True if self.leaves else super().shutdown()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes for which this one should start its ranks again: those that
        wait for the next round, if it has room, and those that are lost. Raises RendezvousError.
        """
        waiting = int(super().num_nodes_waiting())
        return self.lost() + (0 if self._full else waiting)

    def lost(self) -> int:
        """Return how many nodes of this round have given no sign of life (`lost_words`); 0 once
        the run has ended on any node.
        """
        state, now = self._state_holder.state, time.monotonic()
        here = self._members if state.closed else {*state.participants} | state.wait_list
        self._away = {node: self._away.get(node, now) for node in self._members - here}
        return sum(now - since >= AWAY_S for since in self._away.values())

    def joining(self) -> int:
        """Return how many nodes wait for the next round that are not in this one."""
        return len(self._state_holder.state.wait_list - self._members)

    def restarting(self) -> int:
        """Return how many nodes of this round wait for the next one; 0 once the run has ended."""
        state = self._state_holder.state
        return 0 if state.closed else len(state.wait_list & self._members)

    @property
    def lost_words(self) -> str:
        """That a node counts as lost, and after how many seconds without a sign of life."""
        settings = self._settings
        seconds = settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt
        return f"no sign of a node for {seconds:.0f} s"

    @property
    def spare(self) -> bool:
        """True if this node waits for one of the run's to be lost."""
        return self._full and self._this_node not in self._state_holder.state.participants

    def _missing(self) -> str:
        """How many of the nodes that a round needs have not come; empty if none is missing."""
        least = self._settings.min_nodes
        missing = least - len({*self._state_holder.state.participants, self._this_node})
        return missing_nodes(missing, least) if missing > 0 else ""

    def _awaited(self) -> str:
        missing = self._missing()
        return f"{missing} at {self._endpoint}" if missing else ""

    @property
    def _full(self) -> bool:
        return len(self._state_holder.state.participants) >= self._settings.max_nodes


def _wait_for_store(parameters: RendezvousParameters) -> None:
    """Wait for the node that keeps the store, if it is another one. Raises RendezvousError."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    keeps = parameters.get_as_bool("is_host")
    if _matches_machine_hostname(host) if keeps is None else keeps:
        return
    seconds = parameters.get_as_int("join_timeout", JOIN_S) or JOIN_S
    with announced(lambda: f"the node at {host}:{port}"):
        wait_for_first_node(host, port, timedelta(seconds=seconds))
