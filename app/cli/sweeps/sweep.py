"""Sweeps: `python train.py -m key=value,value …` trains every combination of the values given
(docs/sweeps.md).

1. All combinations are composed and planned before anything is written or started.
2. Combinations that are impossible or too big are skipped with the reason; jobs that an earlier
   start of the same sweep has finished are not repeated.
3. The other jobs go to a Hydra launcher: ours (app.cli.sweeps.jobs), or one that submits to SLURM.
4. A report is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from app.choices import Device
from app.cli.options.arguments import Typed, is_share, refuse_share
from app.cli.processes.ctrl_c import interrupt_again
from app.cli.processes.environment import environment
from app.cli.report import report
from app.cli.run_report.facts import flat, run_facts, settings
from app.cli.run_report.sweep_record import Job, JobState, Sweep, left_to_sweep, locked
from app.cli.start.launch import TORCHRUN
from app.cli.sweeps.combinations import Combination, combinations, folder_names, host_gpus
from app.cli.sweeps.jobs import run_jobs
from app.cli.sweeps.places import Place, places
from app.cli.sweeps.submitted import how_it_ended, submit
from app.config import Run, SweepConfig
from app.engine.files.run_folder import CONFIG, holds_run, plain
from app.engine.report.lasting import lasting_output
from app.errors import ConfigError, warn
from app.plan.formatting import count_of
from app.programs import command_name, page
from app.shell import quoted

EXAMPLE = "optim.lr=1e-3,3e-3"
NAME = "{name}"  # in hydra.sweep.dir: replaced by model and digest of the overrides


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """Arguments that Hydra passes to a sweeper."""

    hydra_context: HydraContext  # composes configurations
    task_function: TaskFunction  # main of train.py
    config: DictConfig  # composed without the swept overrides; includes Hydra's own part
    arguments: tuple[str, ...]  # overrides as typed

    @property
    def here(self) -> bool:
        """Return whether our launcher runs the jobs on this host."""
        return self.launcher_name == "torchrun"

    @property
    def launcher_name(self) -> str:
        """Return the option chosen for hydra/launcher."""
        return str(self.config.hydra.runtime.choices["hydra/launcher"])

    @property
    def command(self) -> str:
        """Return the command line of the sweep, rebuilt from what Hydra has parsed."""
        own = [
            override
            for override in self.config.hydra.overrides.hydra
            if not override.startswith("hydra.mode=")
        ]
        words = shlex.join(["-m", *self.flags, *own, *self.arguments])
        return f"{command_name('train')} {words}"

    @property
    def own_arguments(self) -> list[str]:
        """Return the overrides of jobs: all but those of `sweep`."""
        return [word for word in self.arguments if not is_share(word)]

    @property
    def flags(self) -> list[str]:
        """Return the typed flags that name folders of options, such as --config-dir FOLDER."""
        return dataclasses.replace(Typed.of_config(self.config.hydra), overrides=()).words

    def combinations(self, gpus: Sequence[int] | None) -> list[Combination]:
        """Return every combination of the sweep; `gpus` as in `combinations`. Raises ConfigError,
        or Hydra's error for a mistake in the overrides.
        """
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(
            list(self.arguments)
        )
        return combinations(
            overrides, lambda chosen: loader.load_sweep_config(self.config, chosen), gpus
        )

    def launcher(self, folder: Path) -> Launcher:
        """Return the chosen launcher, set up for the sweep's folder."""
        self.config.hydra.sweep.dir = str(folder)
        self.config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(folder)}")
        return Plugins.instance().instantiate_launcher(
            self.hydra_context, self.task_function, self.config
        )


def run_sweep(asked: SweepRequest) -> None:
    """Plan, launch, report. Raises ConfigError; SystemExit with 1 if a job failed, with 130 if
    interrupted.
    """
    _check_launcher(asked.launcher_name)
    gpus = host_gpus() if asked.here else None
    share = _share_of(asked.config)
    found = asked.combinations(gpus)
    runs = [combination.run for combination in found if combination.run is not None]
    _check_shares(share, runs, asked.launcher_name)
    on_cpu = all(run.train.device is Device.cpu for run in runs)
    at = places(share, len(gpus or ()), on_cpu and bool(runs), environment())
    folder = Path(
        asked.config.hydra.sweep.dir.replace(
            NAME, sweep_name(found, (*asked.flags, *asked.own_arguments))
        )
    )
    sweep = planned(folder, asked.command, found)
    _print_opening(sweep)
    if all(job.state is JobState.skipped for job in sweep.jobs):
        warn("nothing to train: every combination was skipped")
        sys.exit(1)
    interrupt_again()
    # a closed terminal must not end jobs that are still saving
    with lasting_output(), locked(folder):
        sweep.save()
        interrupted = _launch(asked, sweep, found, at=at)
        report(folder)
    if interrupted:
        print("stopped; the same command resumes", file=sys.stderr)
        sys.exit(130)
    if any(job.state not in (JobState.done, JobState.skipped) for job in _reloaded(folder).jobs):
        sys.exit(1)


def places_here(config: DictConfig) -> Sequence[Place]:
    """Return the places of jobs that another sweeper chooses, which nobody knows ahead. Raises
    ConfigError.
    """
    share = _share_of(config)
    gpus = 0 if share == SweepConfig() else len(host_gpus())
    return places(share, gpus, config.train.device is Device.cpu, environment())


def _share_of(config: DictConfig) -> SweepConfig:
    """Return the section `sweep`. Raises ConfigError."""
    share = OmegaConf.to_object(config.sweep)
    assert isinstance(share, SweepConfig), "the schema says so"
    return share


def _check_shares(share: SweepConfig, runs: Sequence[Run], launcher: str) -> None:
    """Raise ConfigError if jobs differ in their section `sweep`, or another launcher runs them."""
    for field in dataclasses.fields(SweepConfig):
        key, value = f"sweep.{field.name}", getattr(share, field.name)
        for other in {getattr(run.sweep, field.name) for run in runs} - {value}:
            rule = "is for all jobs, and other options that are swept have it too"
            raise ConfigError(key, other, rule, advice=f"type one {key} for all")
        if value is not None:
            refuse_share(key, value, launcher)


def _launch(
    asked: SweepRequest, sweep: Sweep, found: Sequence[Combination], *, at: Sequence[Place]
) -> bool:
    """Run the waiting jobs; return whether they were interrupted. Raises ConfigError if
    another launcher could submit none."""
    runs = {frozenset(combination.overrides): combination.run for combination in found}
    waiting = [
        (job, runs[frozenset(job.overrides)]) for job in sweep.jobs if job.state is JobState.waiting
    ]
    arguments = [job_arguments(sweep, job, run) for job, run in waiting if run is not None]

    def start() -> None:
        asked.launcher(sweep.folder).launch(arguments, initial_job_idx=0)

    try:
        with told_to_end_is_ctrl_c():
            if arguments and asked.here:
                script = inspect.getfile(asked.task_function)
                typed = Typed.of_config(asked.config.hydra)
                run_jobs(script, sweep.folder, arguments, typed=typed, places=at)
            elif arguments:
                _submit(asked.launcher_name, start, sweep)
    except KeyboardInterrupt:
        return True
    return False


def _submit(name: str, start: Callable[[], object], sweep: Sweep) -> None:
    """Let another launcher run the waiting jobs; record their ends. Raises ConfigError if it
    could submit none."""
    waiting = [
        (job, sweep.folder / job.folder) for job in sweep.jobs if job.state is JobState.waiting
    ]
    problem = submit(name, start, sweep.folder, run_dirs=[run_dir for _, run_dir in waiting])
    for job, run_dir in waiting:
        state, reason = how_it_ended(
            sweep.folder, run_dir, f"run_dir={quoted(run_dir)}", problem=problem
        )
        sweep = sweep.changed(job.number, state=state, reason=reason)
    sweep.save()


def _check_launcher(name: str) -> None:
    if name == "basic":
        raise ConfigError(
            "hydra/launcher", name, "would train all jobs in this one process", advice=TORCHRUN
        )
    if name == "submitit_slurm" and shutil.which("sbatch") is None:
        raise ConfigError(
            "hydra/launcher", name, "no SLURM on this machine: sbatch is missing", advice=TORCHRUN
        )


def sweep_name(found: Sequence[Combination], arguments: Sequence[str]) -> str:
    """Return model and eight hexadecimal digits of the overrides, independent of their order."""
    models = {combination.model for combination in found}
    digest = hashlib.sha256("\n".join(sorted(arguments)).encode()).hexdigest()
    return f"{models.pop() if len(models) == 1 else 'models'}-{digest[:8]}"


def planned(folder: Path, command: str, found: Sequence[Combination]) -> Sweep:
    """Return the sweep as it will begin or resume, with every job done, skipped or waiting. Raises
    ConfigError if the folder holds something else, or settings have changed.
    """
    sweep = Sweep.load(folder)
    if sweep is None:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                "hydra.sweep.dir", folder, "has files but no sweep", advice="choose a new folder"
            )
        names = enumerate(zip(folder_names(found), found, strict=True))
        jobs = tuple(
            Job(number, name, one.overrides, swept=one.swept) for number, (name, one) in names
        )
        sweep = Sweep(folder, command, time.strftime("%Y-%m-%dT%H:%M:%S"), jobs=jobs)
    by_overrides = {frozenset(combination.overrides): combination for combination in found}
    if {frozenset(job.overrides) for job in sweep.jobs} != set(by_overrides):
        raise ConfigError(
            "hydra.sweep.dir",
            folder,
            f"contains another sweep ({sweep.command})",
            advice="choose a new folder",
        )
    jobs = tuple(
        _as_it_stands(folder, job, by_overrides[frozenset(job.overrides)]) for job in sweep.jobs
    )
    return dataclasses.replace(sweep, jobs=jobs)


def _as_it_stands(folder: Path, job: Job, combination: Combination) -> Job:
    run_dir = folder / job.folder
    if combination.run is not None:
        _check_settings(folder, job, combination.run)
    if (job.state is JobState.done and (run_dir / CONFIG).exists()) or run_facts(run_dir).finished:
        return dataclasses.replace(job, state=JobState.done, reason=None)
    state = JobState.waiting if combination.run is not None else JobState.skipped
    return dataclasses.replace(
        job, state=state, reason=combination.reason, exit_code=None, seconds=None
    )


def _check_settings(folder: Path, job: Job, run: Run) -> None:
    # The same overrides give other settings once a YAML file or a default has changed.
    was = settings(folder / job.folder, as_typed=True)
    for key, now in flat(plain(dataclasses.asdict(run))):
        if key in was and was[key] != now:
            rule = f"{job.folder} was trained with {key}={was[key]}, but it is {now} now"
            raise ConfigError("hydra.sweep.dir", folder, rule, advice="choose a new folder")


def job_arguments(sweep: Sweep, job: Job, run: Run) -> list[str]:
    """Return the overrides that start a job: its own, its run folder, and resume=auto if it has
    already begun.
    """
    run_dir = sweep.folder / job.folder
    where = [f"run_dir={quoted(run_dir)}", "log.console=false"]
    left = left_to_sweep(run.log, sweep.name)
    told = (f"log.{key}={quoted(value)}" for key, value in left.items())
    return [*job.overrides, *where, *told, *["resume=auto"] * holds_run(run_dir)]


def _reloaded(folder: Path) -> Sweep:
    sweep = Sweep.load(folder)
    assert sweep is not None
    return sweep


def _print_opening(sweep: Sweep) -> None:
    skipped = [job for job in sweep.jobs if job.state is JobState.skipped]
    done = sum(job.state is JobState.done for job in sweep.jobs)
    told = [f"{len(skipped)} skipped"] * bool(skipped) + [f"{done} done before"] * bool(done)
    print(f"sweep {sweep.folder}: {', '.join([count_of(len(sweep.jobs), 'job'), *told])}")
    if len(sweep.jobs) == 1:
        print(f"one job only, as no key has several values, like {EXAMPLE} ({page('sweeps.md')})")
    for job in skipped:
        print(f"{sweep.title(job)}  skipped: {job.reason}")
    sys.stdout.flush()


@contextmanager
def told_to_end_is_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM, SIGUSR1 and SIGHUP like Ctrl-C within the block, unless they are ignored."""
    told = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    numbers = [number for number in told if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
