"""Results of a run, read from the files of its run folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

from app.cli.options.continued import take_back
from app.config.renamed import with_new_names
from app.engine.files.checkpoints import newest_checkpoint
from app.engine.files.metric_lines import MOST
from app.engine.files.run_folder import CONFIG, PLAN, read_config, read_metrics
from app.own_files import read_regular
from app.plan.formatting import GIB

# keys that say where a run writes and how it was started, not what it computes
MOST_SECONDS = 1e12  # that are written out
PLACE = ("run_dir", "resume", "log.", "sweep.", "parallel.world_size")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Results of one run; None for what was not measured."""

    finished: bool  # trained to its last step, validated and saved
    step: int  # optimizer steps taken
    steps: int | None  # steps asked for (train.steps)
    reruns: int  # steps rerun because experts lacked memory for their dispatched tokens
    tokens: int | None  # trained on
    tokens_per_s: float | None  # all ranks; median over the second half of the steps
    # tokens_per_s as planned in plan.json; None unless planned from measured speeds
    tokens_per_s_planned: float | None
    tflops_per_gpu: float | None  # model TFLOP/s per rank; median over the second half of the steps
    memory_peak_gib: float | None  # peak of the rank that needed most
    memory_planned_gib: float | None  # that peak as planned in plan.json, for tensors on a GPU only
    memory_reserved_gib: float | None  # most that the GPU allocator of a rank held
    joules_per_token: float | None  # of all GPUs; median over the second half of the steps
    on_gpu: bool  # True: the peak counts tensors on a GPU; False: all memory of the process
    loss: float | None  # loss of the last step, nats per token
    val_loss: float | None  # loss of the last validation, nats per token
    curve: tuple[tuple[int, float], ...]  # (step, loss) of every step
    validations: tuple[tuple[int, float], ...]  # (step, val_loss)

    @property
    def best_loss(self) -> float | None:
        """Return the lowest validation loss, nats per token; None without one, NaN if all are."""
        losses = [loss for _, loss in self.validations]
        return min((loss for loss in losses if not isnan(loss)), default=(*losses, None)[0])

    @property
    def final_loss(self) -> float | None:
        """Return the loss of the last validation, or else of the last step, nats per token."""
        return self.loss if self.val_loss is None else self.val_loss


def run_facts(run_dir: Path) -> RunFacts:
    """Read a run folder, which may be empty or of a run that still writes. Raises ConfigError."""
    rows = read_metrics(run_dir)
    asked = settings(run_dir)
    steps = asked.get("train.steps")
    steps = steps if type(steps) is int else None
    trained = [row for row in rows if "loss" in row]
    validations = tuple((row["step"], row["val_loss"]) for row in rows if "val_loss" in row)
    last: dict[str, Any] = trained[-1] if trained else {}
    return RunFacts(
        finished=_finished(run_dir, steps, asked.get("checkpoint.interval"), validations),
        step=last.get("step", 0),
        steps=steps,
        reruns=sum(row.get("reruns", 0) for row in trained),
        tokens=last.get("tokens"),
        tokens_per_s=_steady(trained, "tokens_per_s"),
        tokens_per_s_planned=_planned_rate(run_dir),
        tflops_per_gpu=_steady(trained, "tflops_per_gpu"),
        memory_peak_gib=_most(trained, "memory_peak_gib"),
        memory_planned_gib=_planned_gib(run_dir),
        memory_reserved_gib=_most(trained, "memory_reserved_gib"),
        joules_per_token=_steady(trained, "joules_per_token"),
        on_gpu=any("memory_reserved_gib" in row for row in trained),
        loss=last.get("loss"),
        val_loss=validations[-1][1] if validations else None,
        curve=tuple((row["step"], row["loss"]) for row in trained),
        validations=validations,
    )


def clock(seconds: float) -> str:
    """Format wall time as hours, minutes and seconds: 0:01:05; "?" for no sensible time."""
    return str(timedelta(seconds=round(seconds))) if 0 <= seconds < MOST_SECONDS else "?"


def settings(run_dir: Path, *, as_typed: bool = False) -> dict[str, Any]:
    """Return dotted key -> value of a run's configuration; empty if none has been written. Raises
    ConfigError for a broken one. as_typed: with what was typed where the program chose for itself.
    """
    try:
        values = read_config(run_dir / CONFIG)
    except FileNotFoundError:
        return {}
    values = with_new_names(values, saved=True)[0]
    if as_typed:
        take_back(values)
    return dict(flat(values))


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested dictionaries as (dotted key, value), without keys of where a run writes."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from flat(value, f"{key}.")
        elif not key.startswith(PLACE):
            yield key, value


def _finished(
    run_dir: Path, steps: int | None, saves: Any, validations: tuple[tuple[int, float], ...]
) -> bool:
    if steps is None or not validations or validations[-1][0] < steps:
        return False
    newest = newest_checkpoint(run_dir)
    return not saves or (newest is not None and int(re.sub(r"\D", "", newest.name)) >= steps)


def _planned_gib(run_dir: Path) -> float | None:
    def most(plan: Any) -> float:
        return max(float(rank["allocated"]) for rank in plan["memory"]) / GIB

    return _planned(run_dir, most)


def _planned_rate(run_dir: Path) -> float | None:
    def rate(plan: Any) -> float | None:
        estimate = plan["schedule"]["estimate"]
        each = float(estimate["tokens_per_second_per_gpu"])
        return each * plan["layout"]["world_size"] if estimate["profile"] else None

    return _planned(run_dir, rate)


def _planned(run_dir: Path, read: Callable[[Any], float | None]) -> float | None:
    try:
        found = read(json.loads(read_regular(run_dir / PLAN)))
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return None  # no plan.json, or one of another version
    return found if found is not None and abs(found) < MOST else None


def _most(trained: list[dict[str, Any]], key: str) -> float | None:
    return max((row[key] for row in trained if key in row), default=None)


def _steady(trained: list[dict[str, Any]], key: str) -> float | None:
    # the first half includes warm-up
    values = [row[key] for row in trained[len(trained) // 2 :] if key in row]
    return median(values) if values else None
