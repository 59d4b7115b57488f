"""`python train.py …` in a forked process: as a fresh interpreter would run it, but with torch
and its like already loaded.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import PIL.Image  # noqa: F401 - what is imported here is not loaded in every program
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import app.cli.torchrun
import app.cli.train
import app.data.hub
import app.engine.report.summary
import app.engine.run.train
import app.engine.run.trainer
from app.cli.options.arguments import CONFIG_NAME
from app.cli.processes import parent
from app.cli.processes.parent import end_with_parent
from tests.forks import Process, Server, begin_fork, nap
from tests.training import composed

TIMEOUT_S = 600  # a machine may be busy


def _warm_up() -> None:
    """Do what every program would do anew: find plugins, parse conf/ and look for fonts."""
    composed([], 1)
    GlobalHydra.instance().clear()
    FigureCanvasAgg(figure := Figure()).draw()
    figure.clear()


_warm_up()
COMPOSED_MODE = Hydra.get_mode


def _mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """Return what is typed as `hydra.mode`, for which Hydra composes everything once more."""
    words = " ".join((*sys.argv[1:], *overrides))
    if "hydra" in words or "--" in words or config_name != CONFIG_NAME:
        return COMPOSED_MODE(hydra, config_name, overrides)
    return None  # files of conf/ say nothing


def run_forked(
    folder: Path,
    line: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    tree: bool = False,
    draws: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Return what `subprocess.run(line, cwd=folder, …)` would, for an interpreter, script and
    arguments; only with `draws` a run draws loss.png.

    Processes that the program itself starts are fresh ones, or with `tree` forked ones too.
    """
    files = [os.memfd_create(name) for name in ("stdout", "stderr")]
    kind = ForkedTree if tree else Forked
    program = kind(line, cwd=folder, env=env, stdout=files[0], stderr=files[1], draws=draws)
    try:
        code = program.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGKILL)
        raise
    encoding = (env or os.environ).get("PYTHONIOENCODING", "utf-8")
    out, err = (_written(file, encoding) for file in files)
    return subprocess.CompletedProcess(list(line), code, out, err)


def _written(file: int, encoding: str) -> str:
    with os.fdopen(file, "rb") as opened:
        opened.seek(0)
        return opened.read().decode(encoding)


class Forked:
    """A Python program in a forked process, with what callers of `subprocess.Popen` ask of one.

    Processes that it starts itself are fresh ones. A run draws loss.png only with `draws`, and
    hydra composes once instead of twice: a third of a short program's time.
    """

    def __init__(
        self,
        args: Sequence[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        start_new_session: bool = False,
        stdin: int | None = None,
        close_fds: bool = True,
        draws: bool = False,
    ) -> None:
        """`stdin` may be subprocess.DEVNULL. Other files are closed; `close_fds` is ignored."""
        if stdin == subprocess.DEVNULL:
            stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, stdin)
        self.args = list(args)
        self.draws = draws
        self.returncode: int | None = None
        self._process: Process | None = None
        given = ((0, stdin), (1, stdout), (2, stderr))
        files = {
            target: file if isinstance(file, int) else file.fileno()
            for target, file in given
            if file is not None
        }
        begins = (cwd, env, start_new_session)
        if Server.own is not None:  # pytest itself: the program gets nothing that tests have left
            self._process = Process(
                lambda *handles: self._become(dict(zip(files, handles, strict=True)), *begins),
                handles=[*files.values()],
            )
            self._process.start()
            self.pid = self._process.pid
            return
        started, begun = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._become(files, *begins)
        os.close(begun)
        os.read(started, 1)  # nothing: the child has closed what it got from here
        os.close(started)

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self._process is not None:
            self._process.is_alive()
            self.returncode = self._process.exitcode
        elif self.returncode is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            nap(self.pid, deadline)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def prepare(self) -> None:
        """Called in the new process, before its program begins."""
        Hydra.get_mode = _mode
        if not self.draws:
            app.engine.report.summary.plot_run = lambda *given: None

    def _become(
        self,
        files: Mapping[int, int],
        cwd: Path | None,
        env: Mapping[str, str] | None,
        new_session: bool,
    ) -> None:
        """Run the program in this process, in the state that a fresh one would find."""
        try:
            if new_session:
                os.setsid()
            begin_fork()
            for target, file in files.items():
                os.dup2(file, target)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            sys.stdout, sys.stderr = (open(each, "w", 1, closefd=False) for each in (1, 2))  # noqa: SIM115
            if 0 in files:
                sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            encoding = os.environ.get("PYTHONIOENCODING")
            sys.stdout.reconfigure(encoding=encoding)
            sys.stderr.reconfigure(encoding=encoding, errors="backslashreplace")
            os.chdir(cwd or ".")
            tempfile.tempdir = None  # TMPDIR may be another
            sys.orig_argv = list(self.args)
            warnings.resetwarnings()
            self.prepare()
            _run(self.args[1:])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _run(line: list[str]) -> None:
    """End this process as an interpreter with this command line would."""
    code: object = 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _interpret(line)
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def _interpret(line: list[str]) -> None:
    """Run what is named on an interpreter's command line."""
    match line:
        case ["-P" | "-u", *rest]:
            _interpret(rest)
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [parent.__file__, starter, _, *rest]:  # would become another program
            sys.orig_argv = [sys.executable, *rest]
            end_with_parent(int(starter))
            _interpret(rest)
        case [script, *rest]:
            sys.argv = [script, *rest]
            if "PYTHONSAFEPATH" not in os.environ:
                sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")


class ForkedTree(Forked):
    """A Python program whose own Python programs, and theirs, are forked too."""

    def prepare(self) -> None:
        """Have programs forked, and leave behind what hydra knows of the one that forks."""
        super().prepare()
        GlobalHydra.instance().clear()
        for module in (subprocess, subprocess_handler):
            _fork_programs(module)


def _fork_programs(module: ModuleType) -> None:
    fresh = module.Popen

    def popen(args: Sequence[str], **options: Any) -> Any:
        forks = args[0] == sys.executable and fresh is not popen
        return ForkedTree(args, **options) if forks else fresh(args, **options)

    module.Popen = popen
