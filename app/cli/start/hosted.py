"""Train within a program that continues after the run: `graphfold.train`, also in a notebook."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO, TextIO

from app.cli.options.advice import Asked
from app.cli.options.arguments import Typed, flags_to_overrides
from app.cli.options.compose import load_typed, settings_line
from app.cli.options.continued import words_for_plain
from app.cli.options.given import given, typed_given
from app.cli.options.messages import mistakes_raised
from app.cli.processes.environment import environment_kept, torch_settings
from app.cli.processes.launcher import NOTED_IN, STARTED_AS, Launch, started_as
from app.cli.start.kept import streams_kept, torch_kept
from app.cli.start.launch import asked_run, check_packages, plan_here
from app.cli.start.notices import notices
from app.cli.start.ranks import ranks_command, wait_for_ranks
from app.cli.start.tracker_server import absent_trackers
from app.data.tokenizer_files import bring_tokenizer
from app.engine.files.signals import INTERRUPTED
from app.errors import ConfigError, warn
from app.planner.plan import Plan
from app.programs import PACKAGE, speaker

SCRIPT = PACKAGE / "cli" / "train.py"
MISTAKE = 2  # exit code
KEPT = 20  # last lines of stderr among which the reason of a failure is looked for


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a run."""

    code: int  # exit code of train.py
    said: str  # why the run ended early; empty after its last step
    folder: Path | None  # of the run; None if it ended before it had one


def train_hosted(overrides: Sequence[str]) -> Outcome:
    """Train in this process, or as several ranks in further ones; the process is left as it was.

    Raises ConfigError, and KeyboardInterrupt after Ctrl-C.
    """
    words, began = given(overrides), time.monotonic()
    with environment_kept() as env, streams_kept(), mistakes_raised():
        launch = own_launch(env)
        asked = partial(_asked, words, launch)
        with mistakes_raised(asked), tempfile.TemporaryDirectory(prefix="graphfold-") as scratch:
            launch = dataclasses.replace(launch, noted_in=Path(scratch) / "folder")
            outcome = _outcome(words, launch, env, began=began)
            if outcome.code == MISTAKE:
                raise ConfigError.of_message(outcome.said)
    if outcome.code == INTERRUPTED:
        raise KeyboardInterrupt(outcome.said)
    return outcome


def own_launch(env: MutableMapping[str, str]) -> Launch:
    """Return the place of a process that no launcher has started, and set the variables that torch
    and gloo read. Raises ConfigError for one of several ranks.
    """
    launch = Launch.from_environment(env)
    if (ranks := launch.world_size or 1) > 1:
        rule = "is one of several ranks, and a function of graphfold starts its ranks itself"
        advice = f"start {started_as(str(SCRIPT))} with that launcher"
        raise ConfigError("WORLD_SIZE", ranks, rule, advice=advice)
    alone = Launch(0, 0, None, requeues=launch.requeues, one_host=True)
    for name, value in {**alone.network(), **torch_settings(env)}.items():
        env.setdefault(name, value)
    return dataclasses.replace(alone, command=started_as(str(SCRIPT)))


def _asked(words: Sequence[str], launch: Launch) -> Asked:
    return asked_run(Typed.parse(flags_to_overrides(words)), launch)


def _outcome(
    words: Sequence[str], launch: Launch, env: MutableMapping[str, str], *, began: float
) -> Outcome:
    """Load the configuration and train. Raises ConfigError."""
    typed = typed_given(words)
    beside = words_for_plain(typed, sweeps=False)
    typed = dataclasses.replace(typed, overrides=(*beside, *typed.overrides))
    run = load_typed(typed)
    for line in notices(run, typed):
        warn(line)
    bring_tokenizer(run.data.tokenizer, True)
    check_packages(run)
    plan = plan_here(run, launch)
    if run.world_size == 1:
        absent = absent_trackers(run, env)
        settings = settings_line(typed)
        code, said = _train_here(plan, launch, settings, began=began, absent=absent)
    else:
        code, said = _train_ranks(plan, words, launch, env)
    assert launch.noted_in is not None, "set for every hosted run"
    noted = launch.noted_in
    folder = Path(noted.read_text(encoding="utf-8")) if noted.exists() else None
    return Outcome(code, said, folder)


def _train_here(
    plan: Plan, launch: Launch, settings: str | None, *, began: float, absent: frozenset[str]
) -> tuple[int, str]:
    """Train as the one rank; return exit code and reason of an early end. Raises ConfigError."""
    from app.engine.files.attempt import HostedAttempt
    from app.engine.run.train import train

    attempt = HostedAttempt(
        launch.requeues,
        settings=settings,
        command=launch.command,
        noted_in=launch.noted_in,
        began=began,
        absent=absent,
    )
    with torch_kept():
        code = train(plan, 0, 0, attempt=attempt)
    return code, " ".join(attempt.said)


def _train_ranks(
    plan: Plan, words: Sequence[str], launch: Launch, env: MutableMapping[str, str]
) -> tuple[int, str]:
    """Train as several ranks; return exit code and reason of an early end. Raises ConfigError."""
    from app.engine.files.attempt import Attempt
    from app.engine.start.start import preflight

    attempt = Attempt(launch.requeues)
    preflight(plan.run, attempt.earlier(plan.run))
    ours = {NOTED_IN: str(launch.noted_in), STARTED_AS: launch.command}
    command, settings = ranks_command(plan.run.world_size, str(SCRIPT), words, env={**env, **ours})
    # The streams of a notebook or a test are not those that children inherit.
    inherits = sys.stdout is sys.__stdout__
    process = subprocess.Popen(
        command,
        env=settings,
        stdout=None if inherits else subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    lines: deque[str] = deque(maxlen=KEPT)
    readers = [Thread(target=_forward, args=(process.stderr, sys.stderr, lines), daemon=True)]
    if process.stdout is not None:
        readers.append(Thread(target=_forward, args=(process.stdout, sys.stdout, deque(maxlen=0))))
    for reader in readers:
        reader.start()
    code = wait_for_ranks(process)
    for reader in readers:
        reader.join()
    return code, _reason(lines)


def _forward(source: IO[str], stream: TextIO, lines: deque[str]) -> None:
    """Print the lines of a child, and keep the last ones."""
    with source:
        for line in source:
            lines.append(line.rstrip())
            stream.write(line)
            stream.flush()


def _reason(lines: Sequence[str]) -> str:
    """Return the last line by which a rank has explained itself, or else the last one."""
    said = [line for line in lines if line]
    prefix = f"{speaker('train')}: "  # of what a rank says
    own = [line.removeprefix(prefix) for line in said if line.startswith(prefix)]
    return [*said, *own][-1] if said else ""
