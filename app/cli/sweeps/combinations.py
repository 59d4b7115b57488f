"""Combinations of a sweep: each is composed, checked and planned before anything is written or
started.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict, read_write

from app.choices import Device
from app.cli.options.advice import Asked
from app.cli.options.arguments import Typed, is_share, key_of
from app.cli.options.compose import load_run
from app.cli.options.explained import COMPOSING, explained, is_mistake
from app.cli.options.keys import all_keys
from app.cli.options.unknown import translated
from app.cli.start.launch import GPU_DEVICES, check_packages, check_room
from app.cli.sweeps.places import check_share
from app.config import Run
from app.errors import ConfigError
from app.plan.formatting import GIB, gib
from app.planner.plan import Plan
from app.programs import command_name

ASK_GPUS = """
import torch
gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(*(gpu.total_memory for gpu in gpus))
"""
NAME_PART, NAME = 32, 120  # most characters of one override, and of all, in a folder's name


@dataclass(frozen=True, slots=True)
class Combination:
    """One planned job: its run, or the reason why it is skipped."""

    overrides: tuple[str, ...]  # all of them
    swept: tuple[str, ...]  # those that differ between combinations
    model: str  # name of the model
    run: Run | None  # None if impossible or too big
    reason: str | None  # why `run` is None


def combinations(
    overrides: Sequence[Override],
    compose: Callable[[list[str]], DictConfig],
    gpus: Sequence[int] | None,
) -> list[Combination]:
    """Return every combination of the values given, the last key varying fastest.

    `gpus` are the bytes of memory of each GPU of this host; None if the jobs run elsewhere. A
    mistake in the overrides themselves, like an unknown key, raises ConfigError or Hydra's error.
    Overrides of `sweep` are no job's own: with others it is the same sweep.
    """
    shares = list(shares_in(overrides))
    choices = {
        override.get_key_element(): _values(override)
        for override in overrides
        if not is_share(str(override.input_line))
    }
    places = [place for place, values in enumerate(choices.values()) if len(values) > 1]
    found = []
    compose = partial(compose_with, compose, shares)
    for chosen in dict.fromkeys(product(*choices.values())):
        try:
            config, run, reason = judged(chosen, compose, gpus)
        except ConfigError as error:
            raise of_all_values(error, overrides) from error
        found.append(
            Combination(
                chosen,
                tuple(chosen[place] for place in places),
                str(config.model.name),
                run=run,
                reason=reason,
            )
        )
    return found


def judged(
    chosen: Sequence[str], compose: Callable[[list[str]], DictConfig], gpus: Sequence[int] | None
) -> tuple[DictConfig, Run | None, str | None]:
    """Return the configuration of a job with the overrides `chosen`, and its run, or the reason why
    it is impossible or too big. Raises as `combinations` does.
    """
    config = _without_hydra(_composed(compose, chosen, gpus))
    if config.run_dir:
        rule = "each job of a sweep has a folder of its own"
        raise ConfigError("run_dir", config.run_dir, rule, advice="give hydra.sweep.dir=…")
    return config, *_judge(config, gpus, _asked(compose, chosen, gpus))


def of_all_values(error: ConfigError, overrides: Sequence[Override]) -> ConfigError:
    """Return the error about a key that has another name here, with all of its swept values."""
    for each in overrides:
        key, _, values = str(each.input_line).partition("=")
        if key != error.key or not each.is_sweep_override():
            continue
        given = _values(each) if each.is_discrete_sweep() else [f"{key}={error.value}"]
        words = [translated(word) for word in given]
        if words == [(word,) for word in given]:  # the program's own names
            continue
        if len({tuple(map(key_of, word)) for word in words}) == 1 == len(words[0]):
            found = [word.partition("=")[2] for (word,) in words]
            same = found == [word.partition("=")[2] for word in given]
            meant = f"{key_of(words[0][0])}={values if same else ','.join(found)}"
            return ConfigError(key, values, error.rule, guess=meant)
    return error


def shares_in(overrides: Sequence[Override]) -> Iterator[str]:
    """Yield the overrides of `sweep`. Raises ConfigError for several values of one."""
    for each in overrides:
        word = str(each.input_line)
        if is_share(word) and each.is_sweep_override():
            key, _, values = word.partition("=")
            raise ConfigError(key, values, "is for all jobs", advice="give one value")
        if is_share(word):
            yield word


def compose_with(
    compose: Callable[[list[str]], DictConfig], shares: Sequence[str], chosen: list[str]
) -> DictConfig:
    """Return the configuration of a job with the overrides `shares` of all and `chosen` of it."""
    return compose([*shares, *chosen])


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key = override.get_key_element()
    if not override.is_discrete_sweep():
        raise ConfigError(
            key,
            str(override.input_line).partition("=")[2],
            "a grid sweep takes lists of values only",
            advice=f"list them like {key}=1,2,3",
        )
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _without_hydra(config: DictConfig) -> DictConfig:
    with read_write(config), open_dict(config):
        del config["hydra"]
    return config


def _composed(
    compose: Callable[[list[str]], DictConfig], chosen: Sequence[str], gpus: Sequence[int] | None
) -> DictConfig:
    try:
        return compose(list(chosen))
    except COMPOSING as error:
        found = explained(error) if is_mistake(error) else error
        if not isinstance(found, ConfigError):
            raise
        raise _asked(compose, chosen, gpus).advised(found) from error


def _judge(
    config: DictConfig, gpus: Sequence[int] | None, asked: Asked
) -> tuple[Run | None, str | None]:
    try:
        return _possible(config, gpus), None
    except ConfigError as error:
        if error.key not in all_keys():
            raise
        return None, str(asked.advised(error))


def _possible(config: DictConfig, gpus: Sequence[int] | None) -> Run:
    run = load_run(config, None)
    check_host(run, gpus)
    return run


def _asked(
    compose: Callable[[list[str]], DictConfig], chosen: Sequence[str], gpus: Sequence[int] | None
) -> Asked:
    def load(typed: Typed) -> Run:
        return _possible(_without_hydra(compose(list(typed.overrides))), gpus)

    return Asked(Typed(tuple(chosen)), load)


def check_host(run: Run, gpus: Sequence[int] | None) -> None:
    """Raise ConfigError if this host lacks a package, GPUs or cores for the ranks, or memory.

    `hardware.gpu_memory_gib` takes precedence over the memory of the GPUs. Without it, memory is
    not checked for a run on the CPU.
    """
    usable = () if gpus is None or run.train.device is Device.cpu else gpus
    if gpus is not None:
        check_packages(run)
        check_room(run, len(usable))
        check_share(run, len(usable))
    memory = run.hardware.gpu_memory_gib or (min(usable) / GIB if usable else None)
    if memory is None:
        return
    plan = Plan(
        dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, gpu_memory_gib=memory))
    )
    if not plan.fits:
        rule = (
            f"too small: a rank needs {gib(plan.busiest.total)} GiB ({command_name('plan')} "
            "what=memory says what to change)"
        )
        raise ConfigError("hardware.gpu_memory_gib", f"{memory:.1f}", rule)


def host_gpus() -> tuple[int, ...]:
    """Return the bytes of memory of each GPU of this host. Asks torch in another process, so that
    the sweep's own process does not load it.
    """
    if not any(Path(device).exists() for device in GPU_DEVICES):
        return ()
    told = subprocess.run(
        [sys.executable, "-c", ASK_GPUS], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return tuple(map(int, told.stdout.split())) if told.returncode == 0 else ()


def folder_names(found: Sequence[Combination]) -> Iterator[str]:
    """Yield a readable folder name per job: its number, then the overrides that differ."""
    width = len(str(len(found) - 1))
    for number, combination in enumerate(found):
        yield "_".join((f"{number:0{width}}", *map(_name_part, combination.swept)))[:NAME].rstrip(
            ".-_"
        )


def _name_part(override: str) -> str:
    key, _, value = override.partition("=")
    return re.sub(r"[^\w.-]+", "", f"{re.split(r'[./]', key)[-1]}-{value}")[:NAME_PART]
