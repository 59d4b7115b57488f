"""Carry out a run on this rank, or start the ranks of this host if no launcher has."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from app.choices import Device, GraphImpl
from app.cli.options.advice import Asked
from app.cli.options.arguments import (
    SWEEPS,
    Typed,
    flags_first,
    flags_to_overrides,
    is_share,
    is_stored,
    key_of,
    refuse_share,
    sweeper_of,
    with_our_search,
    with_sweep_folder,
)
from app.cli.options.compose import (
    check_named,
    load_run,
    load_typed,
    refuse_deletions,
    settings_line,
    settle_saved,
)
from app.cli.options.continued import words_for_plain
from app.cli.options.hydra_words import (
    COMPLETION,
    check_completion,
    check_folders,
    check_plugins,
)
from app.cli.options.listings import list_as_ours
from app.cli.options.messages import readable_errors
from app.cli.options.pretrained import KEY as INIT_FROM
from app.cli.options.unknown import no_such_flag
from app.cli.processes.ctrl_c import interrupt_then_end
from app.cli.processes.environment import share_of_threads, torch_settings
from app.cli.processes.launcher import STARTED_AS, Launch
from app.cli.run_report.facts import run_facts
from app.cli.run_report.sweep_record import left_to_sweep
from app.cli.start.notices import notices
from app.cli.start.ranks import start_ranks
from app.cli.start.supervised import check_supervisable, is_supervised, life_of, supervise
from app.cli.start.tracker_server import absent_trackers
from app.config import Run
from app.data.special_tokens import KEY as TOKENIZER
from app.data.tokenizer_files import bring_tokenizer
from app.engine.report.at_work import trackers_at_work
from app.errors import ConfigError, FirstOf, OwnError, warn
from app.plan.formatting import gib
from app.planner.plan import Plan
from app.programs import command_name, speaker
from app.shell import shell_line

# device files of NVIDIA, AMD and WSL: without any, there is no GPU and torch need not be loaded
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")

CPU_RANKS_PER_CORE = 4  # more gloo processes than that only wait for each other

TORCHRUN = "leave it out: the default is hydra/launcher=torchrun"  # advice

SUBMITIT_REQUEUES = -1  # exit code of submitit once SLURM has requeued the job
SPEAK_S = 10.0  # seconds that other ranks wait for rank 0 to find advice and report a mistake


def check_room(run: Run, gpus: int) -> None:
    """Raise ConfigError if this host has fewer GPUs than ranks, or for `gpus` 0 too few cores."""
    most = gpus or CPU_RANKS_PER_CORE * (os.cpu_count() or 1)
    if run.world_size > most:
        what = "GPUs" if gpus else "processes on its cores"
        world = run.world_size
        ranks = "" if world == run.parallel.dp else f" and these are {world} ranks;"
        rule = f"this host has room for {most} {what};{ranks} use torchrun for several hosts"
        degrees = {axis: getattr(run.parallel, axis) or 1 for axis in ("dp", "tp", "cp", "pp")}
        axis = max(degrees, key=lambda axis: degrees[axis])
        raise ConfigError(
            f"parallel.{axis}",
            degrees[axis],
            rule,
            nearest=_fewer(degrees[axis], run.world_size, most),
        )


def check_packages(run: Run, kind: type[ConfigError] = ConfigError) -> None:
    """Raise an error of this kind if the run needs an optional package that is not installed."""
    for name in ("tensorboard", "mlflow", "trackio"):
        if getattr(run.log, name) and find_spec(name) is None:
            rule = f"the package {name} is not installed"
            raise kind(f"log.{name}", True, rule, advice=f"pip install 'graphfold[{name}]'")


def check_cpu(plan: Plan, ranks_here: int | None = None) -> None:
    """Raise ConfigError for options that need a GPU, and if the ranks of this host hold more
    between steps than its memory. `ranks_here` is their number; None means all ranks of the run.
    """
    impl = plan.run.cuda_graph.impl
    if impl is GraphImpl.transformer_engine:
        rule = "captures on GPUs only, and this run is on the CPU"
        raise ConfigError("cuda_graph.impl", impl, rule, nearest=GraphImpl.local)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks = plan.run.world_size
    kept = sum(each.kept for each in plan.memory) * ranks // len(plan.memory)
    kept = kept * (ranks_here or ranks) // ranks
    if kept > memory:
        room = gib(memory)
        rule = f"its ranks keep {gib(kept)} GiB between steps, and this host has {room} GiB"
        program = command_name("plan")
        advice = f"{program} what=memory with the same overrides shows each part"
        raise ConfigError("train.device", "cpu", rule, advice=advice)


def _fewer(degree: int, world_size: int, most: int) -> FirstOf:
    """Return degrees that leave at most `most` ranks: the largest, then powers of two."""
    largest = most * degree // world_size
    halves = (2**power for power in reversed(range(largest.bit_length())))
    return FirstOf(dict.fromkeys((largest, *halves)) if largest else ())


def mistakes_in_one_line(launch: Launch, arguments: Sequence[str]) -> AbstractContextManager[None]:
    """Within the context rank 0 reports mistakes in one line, with advice that was tried.

    Ranks of other hosts wait for it too: their launcher may host the rendezvous of all.
    """
    return readable_errors(
        "train",
        speak=launch.rank == 0,
        when_stopped=_when_stopped(launch, arguments),
        asked=partial(asked_start, arguments, launch),
        silent_s=SPEAK_S,
    )


def _when_stopped(launch: Launch, arguments: Sequence[str]) -> str:
    """Return the line printed when Ctrl-C ends a run outside its steps: the command that continues
    it from its newest checkpoint; of a sweep, what its own command does.
    """
    if SWEEPS & set(arguments) or "hydra.mode=MULTIRUN" in arguments:
        if sweeper_of(arguments) == "grid":
            return "stopped; the same command resumes"
        if is_stored(arguments):
            return "stopped; the same command adds trials to those stored"
        sweeper = f"hydra/sweeper={sweeper_of(arguments)}"
        return f"stopped; {sweeper} does not resume: start again, in a new folder"
    resume = [] if any(word.startswith("resume=") for word in arguments) else ["resume=auto"]
    command = f"{launch.command} {shell_line([*arguments, *resume])}"
    return f"stopped; to continue from the newest checkpoint, or begin without one: {command}"


def asked_start(arguments: Sequence[str], launch: Launch) -> Asked:
    """Return the requested run, which advice is tried on, as far as it was loaded: with its data
    once these were read.
    """
    return asked_run(typed_of(flags_to_overrides(arguments)), launch)


def asked_run(asked: Typed, launch: Launch) -> Asked:
    """Return `asked_start` of arguments that are read already."""
    has_data = "app.engine.start.start" in sys.modules

    def load(typed: Typed) -> Run:
        run = load_typed(typed, launch.world_size)
        check_named(run, [word for word in typed.overrides if word not in asked.overrides])
        return run

    def check_host(run: Run) -> None:
        gpus = gpus_here(run)
        if run.train.device is Device.cuda and not gpus:
            raise ConfigError("train.device", "cuda", "this host has no usable GPU")
        if launch.world_size is None and run.world_size > 1:
            check_room(run, gpus)
        if not gpus:
            check_cpu(Plan(run), None if launch.one_host else 1)
        if has_data:
            from app.engine.start.start import check_data, usable_gpus

            usable_gpus(run)
            check_data(run)

    return Asked(asked, load, check_host)


def runnable(config: DictConfig, launch: Launch) -> Run:
    """Return the checked run of a composed configuration.

    The first process of each host looks for the Hugging Face model that the run starts from, and
    reports itself what is wrong with it there. Raises ConfigError.
    """
    leads = launch.local_rank == 0
    try:
        run = load_run(config, launch.world_size, asks_hub=leads)
        bring_tokenizer(run.data.tokenizer, leads)
        return run
    except ConfigError as error:
        if leads and launch.rank and error.key in (INIT_FROM, TOKENIZER):
            raise OwnError(
                error.key, error.value, error.rule, guess=error.guess, advice=error.advice
            ) from None
        raise


def gpus_here(run: Run) -> int:
    """Return the number of GPUs that the run may use; load torch only if there may be any."""
    if run.train.device is Device.cpu or not any(Path(device).exists() for device in GPU_DEVICES):
        return 0
    from app.engine.start.start import usable_gpus

    return usable_gpus(run)


def carry_out(run: Run, launch: Launch, script: str, env: MutableMapping[str, str]) -> int:
    """Train on this rank, or start the ranks that the layout asks for; return the exit code.
    Raises ConfigError.
    """
    alone = launch.world_size is None and run.world_size == 1
    threads = {**torch_settings(env), **(share_of_threads(env) if alone else {})}
    for name, value in {**launch.network(), **threads}.items():
        env.setdefault(name, value)
    # The parent of ranks has printed the lines before it started them.
    if launch.rank == 0 and STARTED_AS not in env and HydraConfig.initialized():
        for line in notices(run, typed_of(sys.argv[1:])):
            warn(line)
    # All ranks check: otherwise ranks of other hosts would wait for one that has ended.
    speaks_for_its_host = launch.rank > 0 and launch.local_rank == 0
    check_packages(run, OwnError if speaks_for_its_host else ConfigError)
    recovers = run.checkpoint.memory_every is not None
    if recovers and launch.world_size is not None and not is_supervised(env):
        check_supervisable(run, launch)
        return supervise(launch, env)
    # torch is slow to load: only after the first mistakes have been reported
    from app.engine.files.attempt import Attempt
    from app.engine.run.train import train
    from app.engine.start.start import preflight

    said = f"{speaker('train')}: {_when_stopped(launch, sys.argv[1:])}"
    interrupt_then_end(said if launch.rank == 0 else "")
    trains_here = launch.world_size is not None or run.world_size == 1
    attempt = Attempt(
        launch.requeues,
        launch.master,
        store_stays=launch.agent_store,
        settings=_settings(),
        command=launch.command,
        noted_in=launch.noted_in,
        life=life_of(env),
        absent=absent_trackers(run, env) if trains_here and launch.rank == 0 else frozenset(),
    )
    plan = plan_here(run, launch)
    if recovers and launch.world_size is not None:
        from app.engine.run.recovering import train_recovering

        return train_recovering(plan, launch.rank, launch.local_rank, attempt=attempt)
    if trains_here:
        return train(plan, launch.rank, launch.local_rank, attempt=attempt)
    preflight(run, attempt.earlier(run))
    return start_ranks(run.world_size, script, given_overrides(sys.argv[1:]), env=env)


def plan_here(run: Run, launch: Launch) -> Plan:
    """Return the plan of a run that this host has the GPUs or the memory for; loads torch. Raises
    ConfigError.
    """
    from app.engine.start.start import usable_gpus

    plan = Plan(run)
    gpus = usable_gpus(run)
    if not gpus:
        check_cpu(plan, None if launch.one_host else 1)
    if launch.world_size is None and run.world_size > 1:
        check_room(run, gpus)
    return plan


def _settings() -> str | None:
    """Return the line on settings taken over from an earlier run; None if there are none."""
    return settings_line(typed_of(sys.argv[1:])) if HydraConfig.initialized() else None


def given_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the overrides of this run: the program's arguments, or those of this sweep's job."""
    return typed_of(arguments).words if _in_sweep() else list(arguments)


def typed_of(arguments: Sequence[str]) -> Typed:
    """Return the overrides and flags of this run: from its arguments, or in a sweep from Hydra."""
    if not _in_sweep():
        return Typed.parse(arguments)
    hydra = HydraConfig.get()
    assert isinstance(hydra, DictConfig), "HydraConfig.get() returns a DictConfig at run time"
    typed = Typed.of_config(hydra)
    return dataclasses.replace(typed, overrides=(*typed.overrides, *hydra.overrides.task))


def _in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


@contextmanager
def submitted_job_ends_quietly(launch: Launch) -> Iterator[None]:
    """Let a job called by submitit end normally even if it fails; its log has the stack trace.

    submitit would send an exception to the process that submitted the sweep, which would then stop
    waiting for the other jobs.
    """
    try:
        yield
    except SystemExit as end:
        if not launch.submitted or end.code == SUBMITIT_REQUEUES:
            raise
    except Exception:
        if not launch.submitted:
            raise
        traceback.print_exc()


def checked_arguments(arguments: Sequence[str], launch: Launch) -> list[str]:
    """Check the arguments and return those that hydra.main reads.

    Raises ConfigError for unknown flags, and for sweeps that this process must not run.
    """
    list_as_ours()
    if COMPLETION & set(arguments):
        check_completion(arguments)
        return list(arguments)
    if error := no_such_flag(arguments):
        raise error
    typed = Typed.parse(arguments)
    sweeps = bool(SWEEPS & set(arguments)) or "hydra.mode=MULTIRUN" in typed.overrides
    check_folders(typed.overrides, sweeps=sweeps)
    check_plugins(typed.overrides)
    refuse_deletions(typed)
    _refuse_share(typed.overrides, sweeps)
    with typed.looked_up():
        settle_saved(typed, launch.world_size)
    if SWEEPS & set(arguments):
        _refuse_sweep(arguments, launch)
    beside = words_for_plain(typed, sweeps)
    return with_our_search(with_sweep_folder(flags_first(arguments, typed, beside)))


def best_loss_or_exit(run: Run, code: int) -> float | None:
    """Return the lowest validation loss of a run, which sweepers such as Optuna minimize; None
    without a run folder.

    Raises SystemExit for any exit code but 0.
    """
    if code:
        if trackers_at_work():  # no hooks at exit: those of W&B wait for its service
            sys.stdout.flush()
            os._exit(code)
        sys.exit(code)
    return run_facts(Path(run.run_dir)).best_loss if run.run_dir else None


def with_sweep_run_dir(config: DictConfig) -> DictConfig:
    """Give a job of another sweeper a run folder within its sweep's, unless it names one."""
    if _in_sweep() and config.run_dir is None:
        hydra = HydraConfig.get()
        folder = Path(hydra.sweep.dir)
        config.run_dir = str(folder / str(hydra.job.num))
        for name, value in left_to_sweep(config.log, folder.resolve().name).items():
            config.log[name] = value
    return config


def _refuse_share(overrides: Sequence[str], sweeps: bool) -> None:
    """Raise ConfigError for keys of `sweep` where nothing reads them: without -m, or with another
    launcher.
    """
    launchers = [word.partition("=")[2] for word in overrides if key_of(word) == "hydra/launcher"]
    for word in filter(is_share, overrides):
        value = word.partition("=")[2]
        if not sweeps:
            rule = "is of sweeps, and this is one run"
            raise ConfigError(key_of(word), value, rule, advice="add -m, or leave it out")
        refuse_share(key_of(word), value, launchers[-1] if launchers else "torchrun")


def _refuse_sweep(arguments: Sequence[str], launch: Launch) -> None:
    """Raise ConfigError for a sweep whose jobs would share this process, and for one started under
    torchrun or srun, where each rank would start every job.
    """
    if "hydra/launcher=basic" in arguments:
        rule = "would train all jobs in this one process"
        raise ConfigError("hydra/launcher", "basic", rule, advice=TORCHRUN)
    if launch.world_size is not None:
        rule = f"one of {launch.world_size} ranks, but a sweep starts the ranks of each job"
        advice = f"start it as {command_name('train')} -m …"
        raise ConfigError("--multirun", f"rank {launch.rank}", rule, advice=advice)
