"""Nodes that are lost, spare, or come back: agents of torchrun, each in a session of its own."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from app.cli.processes.several_hosts import BACKEND, SeveralHosts
from app.engine.files.checkpoints import newest_checkpoint
from app.engine.files.run_folder import read_metrics
from app.errors import CORRUPTED
from tests.distributed import run_distributed
from tests.ports import free_port
from tests.processes.stop import launched
from tests.training import LONG, ROOT, composed, corpus_in, losses, train_rank, wait_for

TURNS = ("1 -> 2", "2 -> 1", "1 -> 2")
ENDLESS = (
    "log.console=true",
    "train.steps=1000000",
    "train.eval_interval=0",
    "checkpoint.interval=20",
)


def test_a_node_without_a_sign_of_life_is_lost(monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    given = RendezvousParameters(BACKEND, f"127.0.0.1:{port}", "x", 1, 1, "here", is_host="1")
    rendezvous = SeveralHosts.create(given)
    for _ in range(2):  # in every round ranks get the address of the store that all nodes know
        joined = rendezvous.next_rendezvous().bootstrap_store_info
        assert (joined.master_addr, joined.master_port) == ("127.0.0.1", port)
    assert rendezvous.num_nodes_waiting() == rendezvous.lost() == 0
    state = rendezvous._state_holder.state
    (node,) = state.participants
    del state.participants[node]
    monkeypatch.setattr("app.cli.processes.several_hosts.AWAY_S", math.inf)
    assert rendezvous.num_nodes_waiting() == rendezvous.lost() == 0, "it may be about to wait"
    monkeypatch.setattr("app.cli.processes.several_hosts.AWAY_S", 0)
    assert rendezvous.num_nodes_waiting() == rendezvous.lost() == 1
    state.wait_list.add(node)  # it starts its ranks again
    assert (rendezvous.lost(), rendezvous.joining()) == (0, 0)
    state.participants["another"] = 0
    assert rendezvous.num_nodes_waiting() == 0, "there is no room for it"
    del state.participants["another"]
    state.wait_list.clear()
    state.closed = True  # the run has ended elsewhere, and nobody waits for this node
    assert rendezvous.lost() == 0
    rendezvous.shutdown()


def test_a_range_of_nodes_needs_a_rendezvous(tmp_path: Path):
    code, said, _ = launched(tmp_path, "--nnodes=1:2")
    assert code == 2 and said == (
        "torchrun: --nnodes=1:2: is a range, and --master-addr and --node-rank need a number; "
        "give --rdzv-backend=c10d …\n"
    )


class Nodes:
    """Agents of a run; the first one keeps the rendezvous."""

    program = ROOT / "train.py"

    def __init__(self, folder: Path, count: str, *words: str) -> None:
        self.folder, self.words, self.agents = folder, words, list[subprocess.Popen[bytes]]()
        self.run_dir = folder / "run"
        self.meeting = (f"--nnodes={count}", "--rdzv-backend=c10d", "--rdzv-id=x",
                        f"--rdzv-endpoint=127.0.0.1:{free_port()}")  # fmt: skip

    def start(self) -> None:
        number = len(self.agents)
        conf = f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=2"
        line = ["-m", "app.cli.torchrun", *self.meeting, conf, "--local-addr=127.0.0.1"]
        program = [str(self.program), *self.words, "run_dir=run", "resume=auto"]
        with (self.folder / f"{number}.txt").open("wb") as out:
            agent = subprocess.Popen(
                [sys.executable, *line, "--max-restarts=3", *program],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.agents.append(agent)

    def said(self, number: int) -> str:
        return (self.folder / f"{number}.txt").read_text(errors="replace")

    def resumed(self) -> list[int]:
        """Steps after which starts of the first node's ranks resumed."""
        return [int(step) for step in re.findall(r"resumed .*after step (\d+)", self.said(0))]

    def lose(self, number: int) -> None:
        """Kill an agent, and so its ranks."""
        self.agents[number].kill()

    def ends(self) -> list[int]:
        return [agent.wait(600) for agent in self.agents]


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[str, ...]:
    return corpus_in(tmp_path / "corpus")


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    count, words = request.param
    made = Nodes(tmp_path, count, *corpus_in(tmp_path / "corpus"), *words)
    yield made
    for agent in made.agents:
        if agent.poll() is None:
            agent.kill()
            agent.wait()


@pytest.mark.full
@pytest.mark.parametrize("nodes", [("2", LONG)], indirect=True)
def test_a_spare_node_takes_the_place_of_a_lost_one(nodes: Nodes, corpus: tuple[str, ...]):
    nodes.start()
    nodes.start()
    wait_for(lambda: newest_checkpoint(nodes.run_dir) is not None)
    nodes.lose(1)
    nodes.start()
    nodes.start()  # one more, which is not needed
    *codes, spare = nodes.ends()
    assert (codes, spare) == ([0, -signal.SIGKILL, 0], 0), nodes.said(0)
    run_dir = nodes.folder / "undisturbed"
    run_distributed(train_rank, 2, composed((*corpus, *LONG, f"run_dir={run_dir}"), 2), {})
    assert losses(nodes.run_dir) == losses(run_dir)


@pytest.mark.full
@pytest.mark.parametrize(
    "nodes",
    [("1:2", (*ENDLESS, "checkpoint.keep_last=100000", "parallel.dp=2", "parallel.elastic=true"))],
    indirect=True,
)
def test_fewer_ranks_continue_and_grow_back(nodes: Nodes, corpus: tuple[str, ...]):
    nodes.start()
    wait_for(lambda: (nodes.run_dir / "metrics.jsonl").exists())  # alone, until the other comes
    nodes.start()
    wait_for(lambda: len(nodes.resumed()) == 1)
    wait_for(lambda: step(nodes) > nodes.resumed()[0] + 40)
    nodes.lose(1)
    wait_for(lambda: len(nodes.resumed()) == 2)
    wait_for(lambda: step(nodes) > nodes.resumed()[1] + 10)
    nodes.start()
    wait_for(lambda: len(nodes.resumed()) == 3)
    wait_for(lambda: step(nodes) > nodes.resumed()[2] + 10)
    nodes.agents[0].send_signal(signal.SIGUSR1)
    assert nodes.ends() == [75, -signal.SIGKILL, 75], nodes.said(0)
    said = nodes.said(0)
    assert said.count("1 rank now: parallel.dp=1 (was 2), 2 microbatches a step; dp follows") == 2
    assert said.count("torchrun: a node joins; starting the ranks again\n") == 2
    assert re.findall(r"parallel.dp: \d -> \d", said) == [f"parallel.dp: {x}" for x in TURNS]
    taken = {row["step"]: row["loss"] for row in read_metrics(nodes.run_dir) if "loss" in row}
    for ranks, begin in zip((2, 1, 2), nodes.resumed(), strict=True):  # by hand
        folder = nodes.folder / f"hand-{begin}"
        words = (f"resume={nodes.run_dir}/checkpoints/step-{begin:08}", f"run_dir={folder}")
        until = (f"train.steps={begin + 10}", "train.eval_interval=0", f"parallel.dp={ranks}")
        run_distributed(train_rank, ranks, composed((*corpus, *words, *until), ranks), {})
        rows = [row for row in read_metrics(folder) if "loss" in row]
        assert [row["step"] for row in rows] == list(range(begin + 1, begin + 11))
        assert all(taken[row["step"]] == row["loss"] for row in rows)


def step(nodes: Nodes) -> int:
    rows = (nodes.run_dir / "metrics.jsonl").read_text().splitlines()
    found = re.findall(r'"step": (\d+)', rows[-2] if len(rows) > 1 else "")
    return int(found[0]) if found else 0


STRUCK = """
from app.cli.commands import train
from app.engine.run.trainer import Trainer

take = Trainer.step

def struck(self, stopwatch):
    report = take(self, stopwatch)
    if self.engine.groups.rank == 1 and report.step == 6:
        self.engine.gather_all_params()
        self.engine.optimizer.shards[0][0].params[0] += 1
    return report

Trainer.step = struck
train()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "nodes",
    [
        (
            "1:2",
            (
                "log.console=true",
                "train.steps=20",
                "checkpoint.interval=5",
                "parallel.dp=2",
                "parallel.elastic=true",
                "precision=bf16",
                "train.replay_every=3",
                "train.on_corruption=leave",
            ),
        )
    ],
    indirect=True,
)
def test_a_node_with_corrupt_data_leaves(nodes: Nodes):
    nodes.program = nodes.folder / "struck.py"
    nodes.program.write_text(STRUCK)
    nodes.start()
    nodes.start()
    assert nodes.ends() == [0, CORRUPTED], nodes.said(0)
    said = nodes.said(0)
    assert "step 6: rank 1 (" in said and "holds wrong bits" in said, said
    assert "1 rank now: parallel.dp=1 (was 2)" in said, said
    assert nodes.resumed() == [5] and len(losses(nodes.run_dir)) == 20
