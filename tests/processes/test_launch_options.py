"""What torchrun of ours is asked for: mistakes in its own arguments cost one line."""

from __future__ import annotations

import socket
from argparse import Namespace

import pytest

from app.cli import torchrun
from app.cli.processes import launch_options
from app.errors import OwnError
from tests.processes.stop import exit_code

MISTAKES = {
    "--nnodes=two": "must be a number or MIN:MAX",
    "--nnodes=0": "must be at least 1",
    "--nnodes=2:1": "must be a number or MIN:MAX, and MIN is more than MAX; did you mean 1:2?",
    "--nnodes=2 --standalone": "must be 1 with --standalone",
    "--nproc-per-node=gpux": "must be a number, or one of gpu, cpu, xpu, auto; did you mean gpu?",
    "--nproc-per-node=xpu": "this host has no usable XPU; give a number of processes",
    "--nproc-per-node=0": "must be at least 1",
    "--max-restarts=-1": "must be at least 0",
    "--max-restarts=many": "invalid int value",
    "--rdzv-backend=etcdd": "must be one of static, c10d, etcd, etcd-v2; did you mean etcd?",
    "--node-rank=5 --nnodes=2": "must be 0 to 1",
    "--node-rank=-1 --nnodes=2": "must be 0 to 1",
    "--node-rank=5": "must be 0: there is one node",
    "--rdzv-endpoint=a:b --nnodes=2": "must be a host, or HOST:PORT with a port of 1 to 65535",
}


def settled(*words: str) -> Namespace:
    options = launch_options.parsed([*words, "script.py"])
    launch_options.check_options(options)
    torchrun._settle_meeting_point(options)
    return options


@pytest.mark.parametrize("words", MISTAKES)
def test_an_argument_that_cannot_be_used_is_named(words: str):
    with pytest.raises(OwnError) as refused:
        settled(*words.split())
    assert str(refused.value) == f"{words.split()[0]}: {MISTAKES[words]}"


@pytest.mark.parametrize("words", ["", "--nnodes=2 --node-rank=1", "--nproc-per-node=auto"])
def test_arguments_that_can_be_used_are_taken(words: str):
    launch_options.check_options(launch_options.parsed([*words.split(), "script.py"]))


@pytest.mark.parametrize(
    ("words", "endpoint"),
    [
        ("--nnodes=1 --master-port=7", "127.0.0.1:7"),
        ("--nnodes=2 --master-addr=localhost", "localhost:29500"),
        ("--nnodes=2 --rdzv-endpoint=localhost", "localhost:29500"),
        ("--nnodes=2 --rdzv-backend=c10d --master-addr=localhost", "localhost:29400"),
    ],
)
def test_launchers_meet_where_they_were_told(
    words: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torchrun, "_check_listener", lambda host, port: None)  # of this machine
    assert settled(*words.split()).rdzv_endpoint == endpoint


def test_a_spare_node_of_c10d_may_have_any_rank():
    line = ["--nnodes=2", "--node-rank=2", "--rdzv-backend=c10d", "script.py"]
    launch_options.check_options(launch_options.parsed(line))


def test_a_mistake_costs_one_line(capfd: pytest.CaptureFixture[str]):
    assert exit_code(lambda: torchrun.main(["--nnodes=two", "script.py"])) == 2
    assert capfd.readouterr().err == "torchrun: --nnodes=two: must be a number or MIN:MAX\n"


@pytest.mark.parametrize(
    "words", ["--rdzv-endpoint=x.invalid:1 --rdzv-backend=c10d", "--master-addr=x.invalid"]
)
def test_a_name_that_does_not_resolve_is_named(words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch_options, "RESOLVE_S", 0)
    monkeypatch.setattr(launch_options, "POLL_S", 0)
    with pytest.raises(OwnError, match="the name does not resolve on this host") as refused:
        settled("--nnodes=2", *words.split())
    assert str(refused.value).startswith(f"{words.split()[0]}: ")


def test_a_name_may_resolve_later(monkeypatch: pytest.MonkeyPatch):
    answers = [socket.gaierror(-2, "Name or service not known"), []]

    def look_up(host: str, port: None) -> object:
        if isinstance(answer := answers.pop(0), OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(launch_options, "RESOLVE_S", 600)
    monkeypatch.setattr(launch_options, "POLL_S", 0)
    launch_options.check_name(
        launch_options.parsed(["--master-addr=x.invalid", "script.py"]), "x.invalid"
    )
    assert not answers
