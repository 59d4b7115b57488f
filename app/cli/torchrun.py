"""torchrun that keeps exit codes: `python -m app.cli.torchrun`, with torchrun's own arguments.

- Exit code: that of the rank that failed first, reported in one line unless the rank has explained
  itself; plain torchrun always ends with 1 and prints a page.
- Signals: SIGTERM, SIGUSR1, SIGHUP and Ctrl-C are passed on to the ranks, which get the time they
  need to save a checkpoint. A second Ctrl-C kills them. A rank that such a signal kills outside its
  steps counts as stopped.
- Restarts: `--max-restarts` applies to ranks that die, not to mistakes of the user or stops.
- Nodes: when one is lost or joins, the ranks of the others start again (docs/reliability.md).
"""

from __future__ import annotations

from app.cli.processes.ctrl_c import stop_quietly

if __name__ == "__main__":
    stop_quietly("torchrun")  # before the imports, which take seconds

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
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, cast

import torch.distributed.launcher.api as launcher
from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    rendezvous_handler_registry,
)
from torch.distributed.run import parse_min_max_nnodes, run

from app.cli.processes import by_address, one_host, several_hosts
from app.cli.processes.launch_options import (
    C10D,
    STATIC,
    check_name,
    check_options,
    meeting_point,
    parsed,
)
from app.cli.processes.output import ENDED as ENDED_WITH_READER
from app.cli.processes.parent import bound
from app.cli.processes.waiting import say
from app.engine.files.signals import INTERRUPTED, PRESS_S, exit_code, stop_signals
from app.engine.ranks.address import LOOPBACK
from app.engine.ranks.lost import CLOSED
from app.engine.ranks.meeting import CONNECT_S, join_store
from app.engine.report.lasting import print_every_character
from app.engine.watchdog.watchdog import EXIT_STUCK
from app.errors import CORRUPTED, DIVERGED, LEAVES, OwnError

# exit codes that train.py explains itself: a mistake, a diverged or corrupted run, a stop, Ctrl-C,
# a closed pipe
SAID = (2, DIVERGED, CORRUPTED, LEAVES, os.EX_TEMPFAIL, INTERRUPTED, ENDED_WITH_READER)
PASSED_ON = stop_signals()
NODES = "--nnodes"
AGAIN = "starting the ranks again"
# keys that count the nodes of a round: those whose ranks have ended, those that have noticed all
ENDED, LEAVING = "graphfold/ended", "graphfold/leaving"
JOIN_S = 5.0  # seconds in which a node that has ended its ranks waits for the next round
FOLLOW_S = 60  # seconds in which the other ranks must end once one has
LOOK_S = 0.5  # seconds between looks at the other nodes, when this one's ranks have ended
POLL_S = 0.05  # seconds between checks of ranks that are ending


class Agent(LocalElasticAgent):
    """torch's elastic agent of one host, made to pass on signals and keep exit codes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._told: int | None = None  # the signal that has asked this launch to end
        self._counted = False  # True once other nodes know that the ranks of this one have ended
        self._presses: list[float] = []  # times of Ctrl-C; monotonic clock, seconds
        handler = self._worker_group.spec.rdzv_handler
        self._nodes = handler if isinstance(handler, several_hosts.SeveralHosts) else None
        # True while it waits for the other nodes, up to ten minutes, and if they do not come
        self._meets = False
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._pcontext is None:
            _end_before_ranks(number, frame)
        if self._meets:  # there are no ranks any more
            say(f"ended by {_name(number)} while it waits for nodes to start the ranks again")
            sys.exit(exit_code(number))
        if number == signal.SIGINT:
            now = time.monotonic()
            # One press in a terminal arrives twice: from the terminal, and from the parent
            # program, which passes it on. Count it once.
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
                # A second Ctrl-C kills: a rank that waits in a collective runs no handler.
                os.kill(pid, signal.SIGKILL if len(self._presses) > 1 else number)

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run until the ranks end; on a spare node that gets none, until the others' end."""
        result: RunResult | None
        try:
            result = super().run(role)
        except RendezvousError:  # also where the node that keeps the rendezvous ended first
            if not self._is_spare:
                raise
            result = None
        finally:
            if not self._counted:  # others that wait in `_others_end` need not wait for this node
                with suppress(RuntimeError):
                    self._count(ENDED)
                    self._count(LEAVING)
        if result is None:
            say("the launch has ended, and this node was spare")
            result = RunResult(WorkerState.SUCCEEDED)
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meets = True
        if self._told is not None:  # after the ranks had ended
            sys.exit(exit_code(self._told))
        super()._rendezvous(worker_group)
        self._meets = False

    @property
    def _is_spare(self) -> bool:
        """True if it waits for ranks, and others are as many nodes as the run takes."""
        return self._meets and self._nodes is not None and self._nodes.spare

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY and self._nodes:  # for other nodes
            if self._nodes.lost():
                say(f"{self._nodes.lost_words}; {AGAIN}")
                # Ranks that wait for those of a lost node neither save nor heed SIGTERM.
                self._shutdown(signal.SIGKILL)
            elif self._nodes.joining():
                say(f"a node joins; {AGAIN}")
        super()._restart_workers(worker_group)
        if self._told is not None:  # the signal came while there were no ranks
            self._tell_ranks(self._told)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except RendezvousError:
            if self._pcontext is None or self._is_spare:  # two spare nodes may be faster than it
                raise
        # The node that hosts the rendezvous has ended. The ranks here will fail too; wait for
        # them, because their exit code says more than the lost rendezvous.
        deadline = time.monotonic() + FOLLOW_S
        while (result := self._monitor_workers(self._worker_group)).state == WorkerState.HEALTHY:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"connection lost, and the ranks of this node did not end within {FOLLOW_S} s"
                )
            time.sleep(self._worker_group.spec.monitor_interval)
        if any(failure.exitcode not in SAID for failure in result.failures.values()):
            say("the node of --rdzv-endpoint has ended: start again, with another one there")
        return result

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._told is not None:
            self._let_all_end()
        self._kill_what_hangs()
        result: RunResult = super()._monitor_workers(worker_group)
        succeeded = result.state == WorkerState.SUCCEEDED
        if self._others_start_again(result) or (succeeded and not self._others_end()):
            return RunResult(WorkerState.HEALTHY)  # torch then starts them again, at no charge
        if result.is_failed():
            failures = result.failures
            stuck = {rank: each for rank, each in failures.items() if each.exitcode == EXIT_STUCK}
            result.failures = stuck or failures  # a hang is the cause of the other ranks' ends
            error = ChildFailedError("", result.failures)
            failure = error.get_first_failure()[1]
            if self._told is not None and -failure.exitcode in PASSED_ON:
                say(_ended(error))
                failure.exitcode = exit_code(-failure.exitcode)
            elif len(self._presses) > 1:
                failure.exitcode = INTERRUPTED
            if failure.exitcode == LEAVES and self._nodes:
                self._nodes.leaves = True
            if failure.exitcode in SAID or self._told is not None or self._others_are_over():
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                say(f"{_ended(error)}; {AGAIN}")
        return result

    def _others_start_again(self, result: RunResult) -> bool:
        """Return whether ranks have ended because another node starts its own again, for one that
        joins or is lost.
        """
        if self._nodes is None or self._told is not None or not result.is_failed():
            return False
        codes = {failure.exitcode for failure in result.failures.values()}
        if codes & ({*SAID} - {os.EX_TEMPFAIL}):
            return False
        # Ranks that save because others were asked to may be seen before the node that asked waits.
        deadline = time.monotonic() + (JOIN_S if os.EX_TEMPFAIL in codes else 0)
        with suppress(RendezvousError):  # the node that keeps it has ended
            while not (waiting := self._nodes.num_nodes_waiting()) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            return waiting > 0
        return False

    @property
    def _shared(self) -> Store | None:
        """The store of this round, as a type that torch does not declare."""
        store: Any = self._store
        return cast("Store | None", store)

    def _count(self, key: str) -> None:
        """Count this node; the last one sets `key`/all."""
        store = self._shared
        if store is not None and store.add(key, 1) == self._worker_group.group_world_size:
            store.set(f"{key}/all", "")

    def _others_end(self) -> bool:
        """Wait until the ranks of all nodes have ended; False if another node starts its own again.

        In place of torch's barrier at the end, which waits five minutes for a node whose ranks have
        failed, since such a node does not enter it.
        """
        store, due = self._shared, time.monotonic() + self._exit_barrier_timeout
        assert store is not None, "it has started the ranks"
        with suppress(RendezvousError, RuntimeError):  # the node that keeps the store has ended
            self._count(ENDED)
            self._counted = True
            while not store.check([f"{ENDED}/all"]) and self._told is None:
                if self._nodes is not None:
                    self._nodes.num_nodes_waiting()  # reads the state
                    if self._nodes.restarting():
                        self._counted = False
                        return False
                    if self._nodes.lost():
                        say(f"{self._nodes.lost_words}; the ranks of this one have ended")
                        return True
                if time.monotonic() > due:
                    return True
                time.sleep(LOOK_S)
            self._count(LEAVING)
            if self._told is None:  # all end at once: the store is gone with one of them
                store.wait([f"{LEAVING}/all"], timedelta(seconds=JOIN_S))
        return True

    def _others_are_over(self) -> bool:
        """Return whether no node waits for ranks that are started again: with --master-addr nodes
        do so one by one, and one whose ranks have ended does not.
        """
        store, deadline = self._shared, time.monotonic() + JOIN_S
        alone = self._worker_group.group_world_size == 1
        if store is None or self._nodes is not None or alone or not self._remaining_restarts:
            return False
        with suppress(RuntimeError):
            while not (over := store.check([ENDED])) and time.monotonic() < deadline:
                time.sleep(LOOK_S)
            return bool(over)
        return True

    def _exit_barrier(self) -> None:
        """No-op: `_others_end` has waited."""

    def _kill_what_hangs(self) -> None:
        # When a rank's watchdog has ended it because others hang, torch would wait 30 s for those.
        pids = self._pids()
        if any(_code(pid) == EXIT_STUCK for pid in pids):
            for pid in filter(_runs, pids):
                os.kill(pid, signal.SIGKILL)

    def _let_all_end(self) -> None:
        # torch kills the other ranks once one has ended. After a stop signal all are about to end
        # by themselves: wait, so that each can still print why.
        pids = self._pids()
        deadline = time.monotonic() + FOLLOW_S
        while 0 < sum(map(_runs, pids)) < len(pids) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; return the exit code."""
    print_every_character()
    try:
        options = parsed(arguments)
    except OwnError as error:
        say(str(error))
        return 2
    options.signals_to_handle = "SIGQUIT"  # the Agent handles the others
    _bind_ranks(options)
    # torch offers no other way to use an agent of one's own
    launcher.LocalElasticAgent = Agent  # type: ignore[misc]
    rendezvous_handler_registry.register(one_host.BACKEND, one_host.OneHost.create)
    several = several_hosts.SeveralHosts.create
    rendezvous_handler_registry.register(several_hosts.BACKEND, several)
    rendezvous_handler_registry.register(by_address.BACKEND, by_address.ByAddress.create)
    logging.disable(logging.ERROR)  # failed ranks are reported below, in one line
    try:
        check_options(options)
        _settle_meeting_point(options)
        for number in {*PASSED_ON} - {signal.SIGINT}:  # until the Agent handles them
            signal.signal(number, _end_before_ranks)
        if options.log_dir is None and options.redirects == options.tee == "0":
            # torch would make a folder in /tmp for logs, which nobody has asked for, and leave it
            options.log_dir = os.devnull
        run(options)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code not in SAID:
            say(_ended(error))
        code = CORRUPTED if code == LEAVES else code
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    except Exception as error:
        say(
            _explain(error, options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}")
        )
        return 1 if _ended_elsewhere(error) else 2  # a mistake of the user
    return 0


def _bind_ranks(options: Namespace) -> None:
    """Make the ranks end with this process, even if it dies while they start."""
    if options.no_python:
        return
    named = ["-m"] if options.module else []
    python = [sys.executable, "-u", *named, options.training_script]
    command = bound([*python, *options.training_script_args])
    options.no_python, options.module = True, False
    options.training_script, *options.training_script_args = command


def _settle_meeting_point(options: Namespace) -> None:
    """Choose the rendezvous of the launchers. Raises OwnError if its host does not resolve, or if
    another program has its port.
    """
    if options.standalone:
        options.standalone = False
        options.rdzv_id = uuid.uuid4().hex
        host, port = LOOPBACK, 0
    else:
        host, port = meeting_point(options)
    least, most = parse_min_max_nnodes(options.nnodes)
    if least < most and options.rdzv_backend == STATIC:
        rule = "is a range, and --master-addr and --node-rank need a number"
        raise OwnError(NODES, options.nnodes, rule, advice="give --rdzv-backend=c10d …")
    if most == 1:
        options.rdzv_backend = one_host.BACKEND
        options.rdzv_endpoint = f"{LOOPBACK}:{port}"
    elif options.rdzv_backend in (STATIC, C10D) and "store_type=file" not in options.rdzv_conf:
        check_name(options, host)
        _check_listener(host, port)
        options.rdzv_endpoint = options.rdzv_endpoint or f"{host}:{port}"
    if options.rdzv_backend == C10D:
        options.rdzv_backend = several_hosts.BACKEND
    elif options.rdzv_backend == STATIC:
        options.rdzv_backend, options.rdzv_endpoint = by_address.BACKEND, f"{host}:{port}"
        conf = (options.rdzv_conf, f"rank={options.node_rank}")
        options.rdzv_conf = ",".join(filter(None, conf))


def _check_listener(host: str, port: int) -> None:
    """Check that a program that already listens there is a launcher: torch would wait for any
    other one forever. Raises OwnError.
    """
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:  # the first launcher is still to come
        return
    join_store(host, port)


def _runs(pid: int) -> bool:
    """Return whether a child still runs, without reaping it: torch reads the exit code later."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _code(pid: int) -> int | None:
    """Return the exit code of a child that has ended but is not reaped yet; None otherwise."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_status if ended is not None and ended.si_code == os.CLD_EXITED else None


def _end_before_ranks(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal that comes while there is nothing to save: SystemExit, not the code 75."""
    say(f"ended by {_name(number)} before its ranks began")
    sys.exit(128 + number)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _ended(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    return f"rank {rank} (process {failure.pid}) {_how(failure)}"


def _how(failure: ProcessFailure) -> str:
    if failure.exitcode > 0:
        return f"ended with exit code {failure.exitcode}"
    return f"was ended by {failure.signal_name()}"


def _explain(error: BaseException, endpoint: str) -> str:
    if isinstance(error, OwnError) and error.key.startswith("--"):
        return str(error)
    if isinstance(error, RendezvousClosedError):
        return f"{endpoint}: the run has ended on the other nodes"
    if any(
        "EADDRINUSE" in str(cause) or getattr(cause, "errno", 0) == errno.EADDRINUSE
        for cause in _causes(error)
    ):
        return (
            f"{endpoint}: another program has this port; choose another one, or --standalone on "
            "one host"
        )
    if _keeper_has_ended(error):
        return f"{endpoint}: the launcher there has ended"
    *_, last = _causes(error)
    return f"{endpoint}: {(str(last) or type(last).__name__).splitlines()[0]}"


def _ended_elsewhere(error: BaseException) -> bool:
    """Return whether other nodes have ended the run, or their launcher with the store has ended."""
    return isinstance(error, RendezvousClosedError) or _keeper_has_ended(error)


def _keeper_has_ended(error: BaseException) -> bool:
    """Return whether the store of the rendezvous was lost, with the launcher that kept it."""
    texts = [str(cause) for cause in _causes(error)]
    return any(part in text for part in (*CLOSED, by_address.KEEPER_ENDED) for text in texts)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
