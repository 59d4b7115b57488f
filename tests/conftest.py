"""Settings of every test: one thread per process, no network, kernels interpreted where there is
no GPU.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Generator, Iterator

import pytest

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", OMP_NUM_THREADS="1")
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # torch packs bf16 for AMX by what oneDNN finds, and its attention then fails without AVX-512:
    # whoever wants an older processor gets it for both.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import torch

if not torch.cuda.is_available():
    # read when a kernel is defined: without a GPU its tests run it in Python
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)

# brings Triton along, whose own functions are interpreted only if the variable is set before
from tests.cases import mark_beyond_cover  # noqa: E402
from tests.distributed import POOL  # noqa: E402
from tests.forks import Patches, Server  # noqa: E402
from tests.interpreter import speed_up  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    speed_up()

ENVIRON = os.environ


@pytest.fixture
def monkeypatch() -> Iterator[Patches]:
    """pytest's own, whose patches reach the processes that a test forks."""
    with Patches.context() as patches:
        yield patches


@pytest.fixture(autouse=True)
def the_same_environ() -> None:
    """`datasets` leaves a copy of os.environ in its place once it has mapped in several processes:
    who had imported the first one, as rich has, would see no variable that a test sets.
    """
    os.environ = ENVIRON  # noqa: B003 - not to clear it


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sample")
    group.addoption("--share", type=float, default=1.0, help="share of the tests to run, by chance")
    # in the environment, from which the processes that run tests have it: their own may be later
    now = int(os.environ.setdefault("SHARE_SEED", str(int(time.time()))))
    group.addoption("--share-seed", type=int, default=now, help="which ones; default: the time")


def pytest_sessionfinish(session: pytest.Session) -> None:
    POOL.stop()
    if Server.own is not None:
        Server.own.stop()
        Server.own = None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect tests without garbage collection, and exempt what was loaded from later ones. Then
    fork the server of processes, in the processes that run tests: it has loaded all their modules.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        controls_workers = session.config.getoption("dist", "no") != "no"
        if hasattr(session.config, "workerinput") or not controls_workers:
            Server.own = Server()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say how to draw the same tests again."""
    share, seed = config.getoption("--share"), config.getoption("--share-seed")
    return None if share >= 1 else f"sample: --share {share} --share-seed {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases that `make test` leaves out, then keep a share of all. A test's name and the seed
    decide, so that processes that collect the same tests keep the same ones.
    """
    mark_beyond_cover(items)
    share, seed = config.getoption("--share"), config.getoption("--share-seed")
    kept = [item for item in items if random.Random(f"{seed} {item.nodeid}").random() < share]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
