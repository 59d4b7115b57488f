"""torchrun that keeps exit codes: `python -m app.cli.torchrun`, with torchrun's own arguments.

torchrun ends with 1 whatever its ranks ended with, below a page about it. This ends with the exit
code of the rank that failed first, and says so in a line unless the rank has said what happened
itself. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C go to the ranks, which have the time they need to save;
a rank that they end otherwise, before its steps or after them, has been stopped too. Ctrl-C once
more kills them. A mistake or a stop is final: `--max-restarts` is for ranks that die.
"""

from __future__ import annotations

from app.cli.processes.ctrl_c import stop_quietly
from app.cli.processes.slurm_step import end_with_daemon

if __name__ == "__main__":
    stop_quietly("torchrun")  # the imports take seconds
    end_with_daemon()

import errno
import logging
import os
import signal
import socket
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args, parse_min_max_nnodes, run

from app.cli.processes import one_host
from app.cli.processes.parent import bound
from app.cli.processes.reader import ENDED as ENDED_WITH_READER
from app.cli.processes.scratch import scratch_folder
from app.engine.report.lasting import print_every_character
from app.engine.run.address import LOOPBACK
from app.engine.run.meeting import CONNECT_S, join_store
from app.engine.run.signals import INTERRUPTED, PRESS_S, exit_code, stop_signals
from app.engine.watchdog.watchdog import EXIT_STUCK

# A mistake, a run that diverged, a stop, Ctrl-C: train.py has explained them.
SAID = (2, os.EX_DATAERR, os.EX_TEMPFAIL, INTERRUPTED, ENDED_WITH_READER)
PASSED_ON = stop_signals()
FOLLOW_S = 60  # seconds that ranks have to end once others have
POLL_S = 0.05  # seconds between looks at ranks that are ending


class Agent(LocalElasticAgent):
    """torch's agent of one host, for ranks whose exit codes mean something."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._told: int | None = None  # the signal that ends this launch
        self._presses: list[float] = []  # of Ctrl-C, when; monotonic clock
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._pcontext is None:  # no ranks yet
            sys.exit(exit_code(number))
        if number == signal.SIGINT:
            now = time.monotonic()
            # A terminal's Ctrl-C comes from the program that has started this one as well.
            if self._presses and now - self._presses[-1] < PRESS_S:
                return
            self._presses.append(now)
        self._told = number
        self._tell_ranks(number)

    def _pids(self) -> Collection[int]:
        assert self._pcontext is not None, "it has started the ranks"
        return self._pcontext.pids().values()

    def _tell_ranks(self, number: int) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                # Pressed again; a rank that waits for others would not hear of it.
                os.kill(pid, signal.SIGKILL if len(self._presses) > 1 else number)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        super()._restart_workers(worker_group)
        if self._told is not None:  # meanwhile, when there was nobody to hear it
            self._tell_ranks(self._told)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except RendezvousError:
            if self._pcontext is None:
                raise
        # The node that kept the meeting point has ended. The ranks here follow, and it is their
        # exit code that counts.
        deadline = time.monotonic() + FOLLOW_S
        while (result := self._monitor_workers(self._worker_group)).state == WorkerState.HEALTHY:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"lost, and the ranks of this node do not end within {FOLLOW_S} s"
                )
            time.sleep(self._worker_group.spec.monitor_interval)
        return result

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._told is not None:
            self._let_all_end()
        self._kill_what_hangs()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            failures = result.failures
            stuck = {rank: each for rank, each in failures.items() if each.exitcode == EXIT_STUCK}
            result.failures = stuck or failures  # the other ranks' ends have followed from these
            error = ChildFailedError("", result.failures)
            failure = error.get_first_failure()[1]
            if self._told is not None and -failure.exitcode in PASSED_ON:
                _say(_ended(error))
                failure.exitcode = exit_code(-failure.exitcode)
            elif len(self._presses) > 1:
                failure.exitcode = INTERRUPTED
            if failure.exitcode in SAID or self._told is not None:
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                _say(f"{_ended(error)}; starting the ranks again")
        return result

    def _kill_what_hangs(self) -> None:
        # Where a rank has ended since others hang, torch would give these half a minute to end.
        pids = self._pids()
        if any(_code(pid) == EXIT_STUCK for pid in pids):
            for pid in filter(_runs, pids):
                os.kill(pid, signal.SIGKILL)

    def _let_all_end(self) -> None:
        # Once one has ended torch kills the others, which have stopped too, but may not have said
        # so yet.
        pids = self._pids()
        deadline = time.monotonic() + FOLLOW_S
        while 0 < sum(map(_runs, pids)) < len(pids) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; returns the exit code."""
    print_every_character()
    options = parse_args(list(arguments))
    options.signals_to_handle = "SIGQUIT"  # the others are the agent's
    _bind_ranks(options)
    launcher.LocalElasticAgent = Agent  # type: ignore[misc]  # no other way to have it used
    rendezvous_handler_registry.register(one_host.BACKEND, one_host.OneHost.create)
    logging.disable(logging.ERROR)  # what torchrun has to say about a rank that failed is said here
    try:
        _settle_meeting_point(options)
        with scratch_folder() as scratch:
            options.log_dir = options.log_dir or str(scratch)  # torch would leave one of its own
            run(options)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code not in SAID:
            _say(_ended(error))
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    except Exception as error:
        _say(
            _explain(error, options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}")
        )
        return 2
    return 0


def _bind_ranks(options: Namespace) -> None:
    """Have the ranks end with this process, also where it dies before they can ask for that."""
    if options.no_python or options.module:
        return
    python = [sys.executable, "-u", options.training_script]
    command = bound([*python, *options.training_script_args])
    options.no_python = True
    options.training_script, *options.training_script_args = command


def _settle_meeting_point(options: Namespace) -> None:
    """Choose where the launchers meet; raises OwnError where another program is there."""
    if options.standalone:
        options.standalone = False
        options.rdzv_id = uuid.uuid4().hex
        host = LOOPBACK
        port = 0
    else:
        given = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port or 0}"
        host, port = parse_rendezvous_endpoint(given, default_port=0)
    if parse_min_max_nnodes(options.nnodes)[1] == 1:
        options.rdzv_backend = one_host.BACKEND
        options.rdzv_endpoint = f"{LOOPBACK}:{port}"
    elif options.rdzv_backend in ("static", "c10d"):
        _check_listener(host, port)


def _check_listener(host: str, port: int) -> None:
    """If somebody listens there already it must be a launcher: torch would wait for its answer
    without end.
    """
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:  # the first launcher is still to come
        return
    join_store(host, port)


def _runs(pid: int) -> bool:
    """Whether a child has not ended; leaves its exit code to whoever asks for that."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _code(pid: int) -> int | None:
    """Exit code of a child that has ended and that nobody has asked for it yet."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_status if ended is not None and ended.si_code == os.CLD_EXITED else None


def _say(text: str) -> None:
    with suppress(OSError):  # of a terminal that is gone; what it says must not end the ranks
        print(f"torchrun: {text}", file=sys.stderr, flush=True)


def _ended(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    return f"rank {rank} (process {failure.pid}) {_how(failure)}"


def _how(failure: ProcessFailure) -> str:
    if failure.exitcode > 0:
        return f"ended with exit code {failure.exitcode}"
    return f"was ended by {failure.signal_name()}"


def _explain(error: BaseException, endpoint: str) -> str:
    if any(
        "EADDRINUSE" in str(cause) or getattr(cause, "errno", 0) == errno.EADDRINUSE
        for cause in _causes(error)
    ):
        return (
            f"{endpoint}: another program has this port; choose another one, or --standalone on "
            "one host"
        )
    return f"{endpoint}: {[str(cause) for cause in _causes(error)][-1].splitlines()[0]}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
