"""Rendezvous of processes: who can reach their stores, and which contents are trusted."""

from __future__ import annotations

import datetime
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from app.engine.files import attempt as attempts
from app.engine.files.attempt import Attempt
from app.engine.files.run_folder import holds_run
from app.engine.ranks import meeting
from app.engine.ranks.meeting import join_store, keep_store, meet
from app.errors import OwnError
from tests.ports import free_port
from tests.training import ROOT, composed, corpus_in, wait_for

LISTENS = "0A"  # in the kernel's table of connections
ANYWHERE = {"00000000", "0" * 32}
LOOPBACK = {"0100007F", "0900007F", "00000000000000000000000001000000"}


def listening(pids: set[int]) -> dict[str, str]:
    """Inode -> local address, in hex, of each TCP socket at which these processes listen."""
    mine = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if link.is_symlink() and (target := os.readlink(link)).startswith("socket:["):
                mine.add(target[8:-1])
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[9]: row[1].split(":")[0] for row in rows if row[3] == LISTENS and row[9] in mine}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.9"])
def test_a_store_on_loopback_is_not_open_to_other_hosts(host: str):
    before = listening({os.getpid()})
    store = keep_store(host, 0)
    other = meet(1, 2, (host, store.port))
    other.set("word", "given")
    assert store.get("word") == b"given"
    added = {each: place for each, place in listening({os.getpid()}).items() if each not in before}
    assert set(added.values()) <= LOOPBACK and added


def test_a_store_for_other_hosts_listens_everywhere():
    before = listening({os.getpid()})
    store = keep_store("node-1", 0)
    added = {each: place for each, place in listening({os.getpid()}).items() if each not in before}
    assert set(added.values()) <= ANYWHERE and added
    assert join_store("127.0.0.1", store.port).add("ranks", 1) == 1


def test_a_port_that_another_program_has():
    with socket.create_server(("", 0)) as program:
        port = program.getsockname()[1]
        for host in ("localhost", "127.0.0.1", "node-1"):
            with pytest.raises(OwnError, match=f"^MASTER_PORT={port}: another program on this"):
                keep_store(host, port)


@pytest.fixture(params=["silent", "http"])
def program(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port at which something listens that is no store."""
    if request.param == "silent":
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server.getsockname()[1]
        return
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield web.server_port
        web.shutdown()


JOIN = """
import sys
from app.engine.ranks import meeting
meeting.ANSWER_S = 1.0
try:
    meeting.join_store("127.0.0.1", int(sys.argv[1]))
except ValueError as error:
    print(error)
"""


@pytest.mark.full
def test_another_program_at_the_address_of_a_store_is_named(program: int):
    """In a process of its own: what has asked torch for an answer waits for it to its end.

    Without the shorter wait that it has here, within a minute.
    """
    assert meeting.CONNECT_S + meeting.ANSWER_S < 60
    line = [sys.executable, "-c", JOIN, str(program)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    rule = "another program listens there on 127.0.0.1: it does not answer as a store"
    said = f"MASTER_PORT={program}: {rule}; choose a free one\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_missing_store_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meeting, "TIMEOUT", datetime.timedelta(seconds=0.2))
    with socket.socket() as held:  # a port that no other program can take meanwhile
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        said = f"^MASTER_PORT={port}: nothing listens there on 127.0.0.1"
        with pytest.raises(OwnError, match=said):
            join_store("127.0.0.1", port)


def test_self_connection_is_no_listener(monkeypatch: pytest.MonkeyPatch):
    """The system may choose, for a connection to a free port, that port as its own end."""
    port = free_port()
    connect = socket.create_connection

    def from_the_same_port(address: tuple[str, int], timeout: float) -> socket.socket:
        return connect(address, timeout, source_address=address)

    monkeypatch.setattr(meeting, "TIMEOUT", datetime.timedelta(seconds=0.2))
    monkeypatch.setattr(socket, "create_connection", from_the_same_port)
    with pytest.raises(OwnError, match=f"^MASTER_PORT={port}: nothing listens there"):
        join_store("127.0.0.1", port)


@pytest.mark.full
def test_torchrun_names_another_program_where_launchers_meet(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = "from app.engine.ranks import meeting; meeting.ANSWER_S = 1.0\n"
        code += "import sys; from app.cli.torchrun import main; sys.exit(main(sys.argv[1:]))"
        options = ["--nnodes=2", "--node-rank=1", f"--master-port={port}", "train.py"]
        line = [sys.executable, "-c", code, *options]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"torchrun: 127.0.0.1:{port}: MASTER_PORT={port}: another program listens"
    )
    assert done.stderr.count("\n") == 1


# What an attempt believes of the store.


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Attempt, dist.Store]:
    """A restarted attempt, and its launcher's store; the folders of two runs, of which one is
    its own.
    """
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/mine", "runs/other"):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "config.yaml").touch()
    store = keep_store("127.0.0.1", 0)
    return Attempt(master=("127.0.0.1", store.port), store_stays=True), store


@pytest.mark.parametrize("folder", ["runs/mine", "./runs/mine", "{here}/runs/mine", "runs/a b"])
def test_the_folder_of_the_attempt_before_is_taken(
    launch: tuple[Attempt, dist.Store], tmp_path: Path, folder: str
):
    attempt, _ = launch
    run = composed((), 1)
    assert attempt.earlier(run) is None
    place = Path(folder.format(here=tmp_path))
    place.mkdir(exist_ok=True)
    attempt.note(place)
    assert attempt.earlier(run) == place
    attempt.note(place)
    assert attempt.earlier(run) == place, "every attempt notes it anew"


@pytest.mark.full
def test_a_folder_that_a_stranger_names_is_refused(launch: tuple[Attempt, dist.Store]):
    attempt, store = launch
    attempt.note(Path("runs/mine"))
    noted = dist.PrefixStore(attempts.PREFIX, store)
    word = (Path("runs/mine") / attempts.WORD).read_text()
    assert noted.get(attempts.FOLDER).decode() == f"{word} runs/mine"
    (Path("runs/other") / attempts.WORD).write_text("of another launch")
    strange = (
        "runs/mine",
        " runs/mine",
        f"{word} runs/other",
        f"{word} /etc",
        f"{word}",
        "",
        "x runs/missing",
    )
    for text in (*map(str.encode, strange), b"\xff\x00 runs/mine"):
        noted.set(attempts.FOLDER, text)
        with pytest.raises(OwnError, match="which no attempt of this launch has used"):
            attempt.earlier(composed((), 1))


def test_a_folder_that_was_taken_but_not_described_holds_no_run(tmp_path: Path):
    """A process was killed between the two."""
    (tmp_path / "config.yaml").touch()
    assert not holds_run(tmp_path)
    (tmp_path / "config.yaml").write_text("model: {}")
    assert holds_run(tmp_path)


def family(pid: int) -> set[int]:
    """A process and all that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid}.union(*(family(int(child)) for child in children))


@pytest.mark.full
def test_one_host_run_listens_on_loopback_and_cleans_up(tmp_path: Path):
    corpus, temporary = corpus_in(tmp_path / "corpus"), tmp_path / "tmp"
    temporary.mkdir()
    line = [sys.executable, str(ROOT / "train.py"), *corpus, "parallel.dp=2"]
    about: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "TMPDIR": str(temporary)}}
    long = subprocess.Popen(
        [*line, "train.steps=2000", "run_dir=a"], stdout=subprocess.DEVNULL, **about
    )
    wait_for(lambda: (tmp_path / "a/metrics.jsonl").exists())
    processes = family(long.pid)
    assert len(processes) >= 4 and set(listening(processes).values()) <= LOOPBACK
    assert listening(processes) and not list(temporary.iterdir())
    long.send_signal(signal.SIGTERM)
    long.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes - {long.pid}))
    assert not list(temporary.iterdir())
