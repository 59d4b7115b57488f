"""Processes that benches start: what is read of them, and that none is left behind."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
STDERR = """\
W1121 13:00:00.000000 1 torch/distributed/run.py:800] Setting OMP_NUM_THREADS
[rank1]: Traceback (most recent call last):
[rank1]:   File "peer.py", line 3, in main
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.
[rank1]:[W1121 ProcessGroupNCCL.cpp:1] Warning: destroy_process_group() was not called
E1121 13:00:02.000000 1 torch/distributed/elastic/api.py:900] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


@pytest.fixture(scope="module")
def processes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("processes", ROOT / "bench/processes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_failed_run_says(processes: ModuleType):
    assert (
        processes.why(STDERR, 1)
        == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    )
    assert processes.why("note\ncompare.py: model.x=1: no\n", 2) == "compare.py: model.x=1: no"
    assert processes.why("", 3) == "exit code 3"


def test_a_run_that_hangs_is_ended(processes: ModuleType):
    command = sys.executable, "-c", "import time; time.sleep(99)"
    assert processes.start_and_wait(command, {}, 0.2) == (-1, "", "not done after 0 s")


def test_hanging_run_with_results_is_not_waited_for(
    processes: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "ENDING", 0.2)
    program = "import time; print('{\"step_ms\": 1}', flush=True); time.sleep(99)"
    found = processes.start_and_wait((sys.executable, "-c", program), {}, 60)
    assert found == (0, '{"step_ms": 1}\n', "")


@pytest.mark.full
def test_other_lines_in_braces_are_no_figures(
    processes: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    """A run that logs some goes on until it says its figures."""
    monkeypatch.setattr(processes, "ENDING", 0.1)
    lines = "{a: 1}", '{"args": 1}', '{"step_ms": 2}'
    program = f"import time\nfor each in {lines}: print(each, flush=True); time.sleep(0.4)"
    code, stdout, _ = processes.start_and_wait((sys.executable, "-c", program), {}, 60)
    assert code == 0 and processes.figures(stdout) == {"step_ms": 2}
    assert processes.figures('{"step_ms": 2') == {}  # not written to its end


@pytest.mark.full
def test_processes_that_a_run_leaves_behind_are_ended(processes: ModuleType, tmp_path: Path):
    child = f"import time; time.sleep(1); open({str(tmp_path / 'lives')!r}, 'w')"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    assert processes.start_and_wait((sys.executable, "-c", program), {}, 60)[0] == 0
    time.sleep(2)
    assert not (tmp_path / "lives").exists()
