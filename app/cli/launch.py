"""Processes of a run: what the launcher said, and starting the ranks of this host when nobody did."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from app.choices import Device
from app.cli.arguments import SWEEPS, Typed, flags_first, with_sweep_folder
from app.cli.completion import complete_values_as_typed
from app.cli.compose import load_typed
from app.cli.home import child_paths
from app.cli.messages import RESUMABLE, readable_errors, trial_of
from app.cli.overlaid import overlaid
from app.cli.parent import bound, end_with_parent
from app.cli.run_facts import run_facts
from app.cli.slurm_step import end_with_daemon
from app.cli.sweep_record import left_to_sweep
from app.cli.trial import Trial
from app.config import Run
from app.engine.address import LOOPBACK, loopback_address
from app.engine.signals import STOP_SIGNALS, STOPPED, hand_on
from app.errors import ConfigError, FirstOf, warn
from app.plan.figures import gib
from app.plan.plan import Plan
from app.rules import check_runnable

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # where none is, torch need not be asked
CPU_RANKS_PER_CORE = 4  # more gloo processes than that only wait for each other
SPINS = "10000"  # rounds that a waiting OpenMP thread spins: under a millisecond
TORCHRUN = "leave it away, which is hydra/launcher=torchrun"  # advice
SUBMITIT_REQUEUES = -1  # exit code with which it leaves once SLURM has the job back in its queue
FIRST_PORT, PORTS = 20_000, 10_000  # where the tasks of SLURM jobs meet, below the ports that systems hand out
MOST_PORT = 65_535


def ask_slurm(*command: str) -> str:
    """What a SLURM command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True, slots=True)
class Launch:
    """Place of this process among those that torchrun or SLURM started."""

    rank: int  # global rank
    local_rank: int  # rank on this host
    world_size: int | None  # processes in all; None: started by hand, alone
    master: tuple[str, int] | None = None  # host and port at which the processes meet
    requeues: int = 0  # times that SLURM has started this job again
    agent_store: bool = False  # at `master` is a key-value store that outlives restarts
    one_host: bool = False  # the launcher has started all of them on this host
    submitted: bool = False  # a function that submitit calls, not a program
    launched: bool = False  # a program that torchrun, or srun as one of several tasks, has started

    @classmethod
    def from_environment(cls, env: Mapping[str, str], ask: Callable[..., str] = ask_slurm) -> Launch:
        """Read what torchrun has set, else what srun has set for one of several tasks; `ask` runs scontrol.

        Raises ConfigError for a variable that is missing, no number, or contradicts another.
        """
        job = {"requeues": _number(env, "SLURM_RESTART_COUNT", 0), "submitted": "SUBMITIT_EXECUTOR" in env}
        if "RANK" in env and "WORLD_SIZE" in env:
            place = *_, world_size = _place(env, "RANK", "LOCAL_RANK", ranks="WORLD_SIZE")
            return cls(
                *place,
                master=_torchrun_master(env) if world_size > 1 or "MASTER_PORT" in env else None,
                agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                one_host=_on_one_host(env, world_size),
                launched="TORCHELASTIC_RUN_ID" in env,
                **job,
            )
        # A batch script has SLURM_NTASKS too; only srun's tasks have a step. One task alone may start ranks itself.
        if "SLURM_STEP_ID" in env and _number(env, "SLURM_NTASKS") > 1:
            place = _place(env, "SLURM_PROCID", "SLURM_LOCALID", ranks="SLURM_NTASKS")
            one_host = env.get("SLURM_STEP_NUM_NODES") == "1"
            master = _slurm_master(env, ask, one_host=one_host)
            return cls(*place, master, one_host=one_host, launched=not job["submitted"], **job)
        return cls(0, 0, None, one_host=True, **job)

    def end_with_launcher(self, parent: int) -> None:
        """Have this process end with its launcher, process `parent`, if it has one, and SLURM's daemon."""
        if self.launched:
            end_with_parent(parent)
        end_with_daemon()

    def network(self) -> dict[str, str]:
        """Variables that keep gloo and NCCL from listening to other hosts, where all ranks are on this one."""
        if not self.one_host:
            return {}
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        # NCCL takes a bare name for the beginning of one.
        return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}


def waiting_threads(env: Mapping[str, str]) -> dict[str, str]:
    """How long OpenMP's threads spin when they wait for work, unless the user has chosen; read when torch is loaded.

    Longer than what lies between two operations, shorter than a scheduler's turn: with libgomp's own 300,000 rounds
    they take the cores from other programs, and from each other. Measured by bench/busy.py.
    """
    chosen = env.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    return {} if chosen else {"GOMP_SPINCOUNT": SPINS}


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(name, text, "must be a whole number; torchrun and srun set it") from None


def _place(env: Mapping[str, str], rank: str, local_rank: str, *, ranks: str) -> tuple[int, int, int]:
    """Rank, local rank and number of ranks, from the variables of these names."""
    world_size = _number(env, ranks)
    for name in (rank, local_rank):
        if not 0 <= (found := _number(env, name, 0)) < world_size:
            rule = f"is none of the {world_size} ranks that {ranks} says there are, counted from 0"
            raise ConfigError(name, found, rule)
    return _number(env, rank), _number(env, local_rank, 0), world_size


def _on_one_host(env: Mapping[str, str], world_size: int) -> bool:
    """Whether all ranks are of this host, as their launcher or where they meet says."""
    meet_here = loopback_address(env.get("MASTER_ADDR", "")) is not None
    return meet_here or _number(env, "LOCAL_WORLD_SIZE", 0) == world_size


def _torchrun_master(env: Mapping[str, str]) -> tuple[str, int]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            rule = "RANK and WORLD_SIZE are set, but not where the ranks meet"
            raise ConfigError(name, "", rule, advice="start it by torchrun, which sets them all")
    return env["MASTER_ADDR"], _port(env)


def _port(env: Mapping[str, str], default: int | None = None) -> int:
    port = _number(env, "MASTER_PORT", default)
    if not 0 < port <= MOST_PORT:
        raise ConfigError("MASTER_PORT", port, f"must be 1 to {MOST_PORT}")
    return port


def _slurm_master(
    env: Mapping[str, str], ask: Callable[..., str], *, one_host: bool
) -> tuple[str, int]:
    """Host and port at which the tasks of a step meet: its first node, and a port of this job's unless MASTER_PORT is set."""
    port = _port(env, FIRST_PORT + _number(env, "SLURM_JOB_ID") % PORTS)
    if one_host:
        return LOOPBACK, port
    host = ask("scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]).split()[0]
    try:
        socket.getaddrinfo(host, port)
    except OSError:  # the name is known to SLURM only
        fields = ask("scontrol", "show", "node", "--oneliner", host).split()
        host = next(field.removeprefix("NodeAddr=") for field in fields if field.startswith("NodeAddr="))
    return host, port


def check_room(run: Run, gpus: int) -> None:
    """Raise ConfigError when this host is too small for the ranks, which may use so many GPUs (0: CPU)."""
    most = gpus or CPU_RANKS_PER_CORE * (os.cpu_count() or 1)
    if run.world_size > most:
        what = "GPUs" if gpus else "processes on its cores"
        world = run.world_size
        ranks = "" if world == run.parallel.dp else f" and these are {world} ranks;"
        rule = f"this host has room for {most} {what};{ranks} torchrun joins several hosts"
        degrees = {axis: getattr(run.parallel, axis) or 1 for axis in ("dp", "tp", "cp", "pp")}
        axis = max(degrees, key=lambda axis: degrees[axis])
        raise ConfigError(
            f"parallel.{axis}", degrees[axis], rule, _fewer(degrees[axis], run.world_size, most)
        )


def check_packages(run: Run) -> None:
    """Raise ConfigError when a package is missing that comes with an extra only."""
    if run.log.tensorboard and find_spec("tensorboard") is None:
        rule = "the package tensorboard is not installed"
        raise ConfigError("log.tensorboard", True, rule, advice="pip install tensorboard")


def check_host_memory(plan: Plan) -> None:
    """Raise ConfigError when a rank on the CPU keeps more between steps than this host has memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if plan.busiest.kept > memory:
        rule = f"a rank keeps {gib(plan.busiest.kept)} GiB, and this host has {gib(memory)} GiB"
        advice = "python -m app.cli.plan what=memory says what to change"
        raise ConfigError("train.device", "cpu", rule, advice=advice)


def _fewer(degree: int, world_size: int, most: int) -> FirstOf:
    """Degrees that leave at most `most` ranks: as many as possible, then powers of two."""
    largest = most * degree // world_size
    halves = (2**power for power in reversed(range(largest.bit_length())))
    return FirstOf(dict.fromkeys((largest, *halves)) if largest else ())


def mistakes_told(launch: Launch, arguments: Sequence[str]) -> AbstractContextManager[None]:
    """Within it rank 0 tells mistakes in one line, with advice that was tried."""
    trial = partial(trial_start, arguments, launch)
    return readable_errors("train.py", launch.rank == 0, RESUMABLE, trial)


def trial_start(arguments: Sequence[str], launch: Launch) -> Trial:
    """The trial of the run that is asked for, as far as it came: with its data once they were read."""
    typed, has_data = typed_of(arguments), "app.engine.start" in sys.modules

    def load(overrides: Sequence[str]) -> None:
        run = check_runnable(load_typed(typed.with_overrides(overrides), launch.world_size))
        gpus = _gpus_here(run)
        if launch.world_size is None and run.world_size > 1:
            check_room(run, gpus)
        if not gpus:
            check_host_memory(Plan(run))
        if has_data:
            from app.engine.start import check_data, usable_gpus

            usable_gpus(run)
            check_data(run)

    return trial_of(load)


def _gpus_here(run: Run) -> int:
    """GPUs that the run may use; torch, slow to load, is asked only where there may be some."""
    if run.train.device is Device.cpu or not any(Path(device).exists() for device in GPU_DEVICES):
        return 0
    from app.engine.start import usable_gpus

    return usable_gpus(run)


def carry_out(run: Run, launch: Launch, script: str, env: MutableMapping[str, str]) -> int:
    """Train on this rank, or start the ranks that the layout asks for; returns the exit code. Raises ConfigError."""
    for name, value in {**launch.network(), **waiting_threads(env)}.items():
        env.setdefault(name, value)
    if launch.rank == 0:
        check_packages(run)
    # torch is loaded here, after the first mistakes have been reported.
    from app.engine.attempt import Attempt
    from app.engine.start import preflight, usable_gpus
    from app.engine.trainer import train

    attempt = Attempt(launch.requeues, launch.master, store_stays=launch.agent_store)
    plan, gpus = Plan(run), usable_gpus(run)
    if not gpus:
        check_host_memory(plan)
    if launch.world_size is not None or run.world_size == 1:
        return train(plan, launch.rank, launch.local_rank, attempt)
    check_room(run, gpus)
    preflight(run, attempt.earlier(run))
    return start_ranks(run.world_size, script, given_overrides(sys.argv[1:]), env)


def start_ranks(world_size: int, script: str, overrides: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `script` as `world_size` ranks of this host under torchrun and return the exit code of the first rank to fail.

    Being told to end, this process passes it on and waits, so that no rank is left behind; killed, it takes them along.
    """
    threads = str(max(1, (os.cpu_count() or 1) // world_size))
    torchrun = [sys.executable, "-m", "app.cli.torchrun", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={world_size}", script, *overrides]
    settings = {"OMP_NUM_THREADS": threads, **env, **child_paths(env)}
    process = subprocess.Popen(bound(command), env=settings)
    told: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        told.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    code = process.wait()
    if code == STOPPED and told:
        hand_on(told[0], before[told[0]])
    return code if code >= 0 else 128 - code


def given_overrides(arguments: Sequence[str]) -> list[str]:
    """The overrides of this run: the program's arguments, or those of this job of a sweep."""
    return typed_of(arguments).words if _in_sweep() else list(arguments)


def typed_of(arguments: Sequence[str]) -> Typed:
    """What describes this run: arguments, or what Hydra has composed this job of a sweep from."""
    if not _in_sweep():
        return Typed.parse(arguments)
    config = HydraConfig.instance().cfg
    assert config is not None
    typed = Typed.of_config(config.hydra)
    return dataclasses.replace(typed, overrides=(*typed.overrides, *config.hydra.overrides.task))


def _in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


@contextmanager
def settled(launch: Launch) -> Iterator[None]:
    """Let a job that submitit calls end even where it fails, having said so in its log.

    An exception would travel to the process that submitted the sweep, which would then no longer wait for the other jobs.
    """
    try:
        yield
    except SystemExit as ended:
        if not launch.submitted or ended.code == SUBMITIT_REQUEUES:
            raise
    except Exception:
        if not launch.submitted:
            raise
        traceback.print_exc()


def prepare(arguments: Sequence[str], launch: Launch) -> list[str]:
    """What hydra.main is to read: the arguments, once they are no mistake; says what an experiment overlays.

    Raises ConfigError for unknown flags, and sweeps that this process must not run.
    """
    if {"-sc", "--shell-completion"} & set(arguments):
        complete_values_as_typed()
        return list(arguments)
    typed = Typed.parse(arguments)
    if SWEEPS & set(arguments):
        _refuse_sweep(arguments, launch)
    elif launch.rank == 0 and (launch.world_size is None or not launch.launched):
        for line in overlaid(typed):
            warn(line)
    return with_sweep_folder(flags_first(arguments, typed))


def ended(run: Run, code: int) -> float | None:
    """The lowest validation loss of a run in a folder of its own, for sweepers that search for it.

    Raises SystemExit for any other exit code than 0.
    """
    if code:
        sys.exit(code)
    return run_facts(Path(run.run_dir)).best_loss if run.run_dir else None


def placed(config: DictConfig) -> DictConfig:
    """Give a job of another sweeper, which names no folder, one in the folder of its sweep."""
    if _in_sweep() and config.run_dir is None:
        hydra = HydraConfig.get()
        folder = Path(hydra.sweep.dir)
        config.run_dir = str(folder / str(hydra.job.num))
        for name, value in left_to_sweep(config.log, folder.resolve().name).items():
            config.log[name] = value
    return config


def _refuse_sweep(arguments: Sequence[str], launch: Launch) -> None:
    """Raise ConfigError for jobs in this one process, and where several ranks would each start every job."""
    if "hydra/launcher=basic" in arguments:
        rule = "would train all jobs in this one process"
        raise ConfigError("hydra/launcher", "basic", rule, advice=TORCHRUN)
    if launch.world_size is not None:
        rule = f"one of {launch.world_size} ranks, but a sweep starts the ranks of each job"
        raise ConfigError(
            "--multirun", f"rank {launch.rank}", rule, advice="start it as python train.py -m …"
        )
