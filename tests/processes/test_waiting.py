"""Launchers that wait for other nodes: what they say, and how they end."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from app.cli import torchrun
from app.cli.processes import waiting
from app.cli.processes.by_address import KEEPER_ENDED, ByAddress
from app.cli.processes.several_hosts import SeveralHosts
from tests.forks import Process
from tests.ports import free_port
from tests.training import wait_for

NODE = ["--nnodes=2", "--nproc-per-node=1", "script.py"]
C10D = "--rdzv-backend=c10d --rdzv-id=x --rdzv-endpoint=127.0.0.1:{port} --rdzv-conf=is_host="
STATIC = "--master-addr=127.0.0.1 --master-port={port} --node-rank="
# node -> for what it waits
WAITS = {
    C10D + "1": "1 of 2 nodes",
    C10D + "0": "the node",
    STATIC + "0": "1 of 2 nodes",
    STATIC + "1": "the node",
}
ADVICE = (
    "; start the same command on every node, with the same --nnodes, address and --rdzv-id, and "
    "check that its port is open"
)


@pytest.mark.parametrize("words", WAITS)
def test_a_launcher_says_for_what_it_waits_and_ends_when_told(words: str, tmp_path: Path):
    port, said = free_port(), tmp_path / "said"

    def launch() -> None:
        waiting.SILENT_S = 0.5
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
        os._exit(torchrun.main([*words.format(port=port).split(), *NODE]))

    def child() -> None:
        try:
            launch()
        except SystemExit as ended:
            os._exit(ended.code if isinstance(ended.code, int) else 1)

    node = Process(target=child)
    node.start()
    try:
        told = f"torchrun: waiting for {WAITS[words]} at 127.0.0.1:{port}\n"
        wait_for(lambda: said.exists() and said.read_text().endswith("\n"))
        assert said.read_text() == told
        os.kill(node.pid, signal.SIGTERM)
        node.join(60)
        assert said.read_text() == f"{told}torchrun: ended by SIGTERM before its ranks began\n"
        assert node.exitcode == 128 + signal.SIGTERM
    finally:
        node.kill()
        node.join()


def test_nodes_that_do_not_come_are_counted(monkeypatch: pytest.MonkeyPatch):
    address = f"127.0.0.1:{free_port()}"
    late = RendezvousParameters("c10d", address, "x", 2, 2, "here", is_host="1", join_timeout="1")
    joins = SeveralHosts.create(late)
    with pytest.raises(RendezvousTimeoutError) as ended:
        joins.next_rendezvous()
    assert str(ended.value) == f"1 of 2 nodes did not come within 1 s{ADVICE}"
    assert torchrun._explain(ended.value, address) == f"{address}: {ended.value}"
    joins.shutdown()
    with pytest.raises(RendezvousTimeoutError, match=r"^2 of 3 nodes did not come within 0 s"):
        meets = ByAddress("127.0.0.1", free_port(), 0, world_size=3, run_id="x", timeout=0)
        meets.next_rendezvous()
    with pytest.raises(RendezvousTimeoutError, match=r"^the node there did not come within 0 s"):
        waiting.wait_for_first_node("127.0.0.1", free_port(), timedelta(milliseconds=1))


def test_an_end_without_a_text_is_told_by_its_kind():
    assert torchrun._explain(RendezvousTimeoutError(), "n1:1") == "n1:1: RendezvousTimeoutError"


@pytest.mark.parametrize(
    "text",
    ["Failed to recv, got 0 bytes. Connection was likely closed. Did the remote", KEEPER_ENDED],
)
def test_the_launcher_that_kept_a_lost_store_is_named(text: str):
    ended = RendezvousConnectionError("the connection has failed")
    ended.__cause__ = RuntimeError(text)
    assert torchrun._ended_elsewhere(ended)
    assert torchrun._explain(ended, "n1:1") == "n1:1: the launcher there has ended"
    assert not torchrun._ended_elsewhere(RendezvousTimeoutError())


def test_a_node_that_comes_after_the_end_is_no_mistake():
    ended = RendezvousClosedError()
    assert torchrun._ended_elsewhere(ended)
    assert torchrun._explain(ended, "n1:1") == "n1:1: the run has ended on the other nodes"
