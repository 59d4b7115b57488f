"""Print the opening of a run: what trains where, what fits, how fast; all details if asked for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from app.config import Run
from app.data.best_fit import BestFitSequences
from app.data.blend import BlendedSequences
from app.data.feed import DataSplit
from app.data.packing import PackedSequences
from app.data.paths import source_option
from app.data.stream import StreamedSequences
from app.engine.fast_paths import graphs_line, slow_paths
from app.engine.files.checkpoints import fault_of_latest
from app.engine.fp8 import fp8_line
from app.engine.ranks.dtypes import DTYPES
from app.engine.report.pace import pace_line, planned_step
from app.engine.start.start import Data, Start
from app.engine.step.engine import Engine
from app.model.attention.chosen import attention_line
from app.model.attention.delta_library import linear_attention_line
from app.plan.formatting import GIB, amount, count_of
from app.plan.partners import repeaters
from app.planner.plan import Plan
from app.planner.summary import degrees, memory_line, no_fit, summary_lines
from app.version import VERSION, Version

NO_PADDING = 0.001  # share of positions
MUCH_PADDING = 0.05  # share of positions that is told without log.verbose
MOST_TRIED = 1_000_000  # documents of a corpus that is packed anew to advise on data.max_documents
Row = tuple[str, str]  # heading and text


def print_opening(
    engine: Engine, folder: str, start: Start, *, data: Data, version: Version, settings: str | None
) -> None:
    """Print what a run trains, where, whether it fits and how fast; what it resumes; warnings.

    With log.verbose also layout, batch, kernels, captured parts, known slow paths and their costs.
    `settings` names the run whose settings it took, if any, and keys renamed since.
    """
    run = engine.plan.run
    if run.log.verbose:
        rows = [*_details(engine, folder, data), ("version", version.short)]
        if start.by_torch:
            rows.append(("attention", f"by torch, as {start.by_torch}"))
    else:
        rows = [*_calm(engine, folder, data)]
    rows += [("data", text) for text in _cut(data)]
    if run.model.moe and run.model.moe.force_balance:
        text = "model.moe.force_balance sends tokens to experts in turn: for timing only"
        rows.append(("WARNING", text))
    rows += [("settings", settings)] if settings is not None else []
    rows += _continued(run, start, version)
    for name, text in rows:
        print(f"{name:>12}  {text}")
    print(flush=True)


def _calm(engine: Engine, folder: str, data: Data) -> Iterator[Row]:
    """Yield the rows without log.verbose: five at most, but for warnings."""
    plan, run, device = engine.plan, engine.plan.run, engine.device
    yield "model", dict(summary_lines(plan))["model"]
    tokens = amount(run.steps * run.train.global_batch * run.train.seq_len)
    yield "run", f"{count_of(run.steps, 'step')}, {tokens} tokens of {_corpus(run, data.train)}"
    yield "device", _devices(plan, device)
    yield "folder", folder
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        told = f"{plan.busiest.total / GIB:.1f} GiB of {memory / GIB:.1f}"
        step = planned_step(plan, torch.cuda.get_device_name(device))
        yield "planned", f"{told}{step and f', {step}'}{no_fit(plan, memory)}"
    yield from _replays(plan)
    if slow := dict.fromkeys(name for name, _ in slow_paths(run, device, engine.static)):
        yield "slower", f"{', '.join(slow)}: log.verbose=true says why"
    if not isinstance(data.train.sequences, StreamedSequences):
        much = data.train.sequences.padding >= MUCH_PADDING
        if much and (padding := _padding(data.train)):
            yield "data", padding


def _details(engine: Engine, folder: str, data: Data) -> Iterator[Row]:
    """Yield the rows of log.verbose."""
    plan, run, device = engine.plan, engine.plan.run, engine.device
    yield from summary_lines(plan)
    yield "device", _device(device)
    yield "folder", folder
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        yield "memory", memory_line(plan, memory)
    if engine.recorder is not None:
        yield "graphs", graphs_line(run, device)
    if run.precision.fp8.recipe is not None:
        yield "fp8", fp8_line(run, device)
    if positions := positions_line(run):
        yield "positions", positions
    if attention := attention_line(run, DTYPES[run.precision.params], device):
        yield "attention", attention
    if run.model.linear_attention is not None:
        dtype, deterministic = DTYPES[run.precision.params], run.train.deterministic
        yield (
            "linear attention",
            linear_attention_line(dtype, device, deterministic=deterministic),
        )
    yield from _replays(plan)
    if pace := pace_line(plan, device):
        yield "planned", pace
    yield from slow_paths(run, device, engine.static)
    for line in (_sources(data.train), _padding(data.train)):
        if line:
            yield "data", line


def _replays(plan: Plan) -> Iterator[Row]:
    """Say who repeats whose work, with train.replay_every."""
    every = plan.run.train.replay_every
    if every is not None:
        alone = "the same rank: no other holds the same weights"
        who = alone if repeaters(plan.run, plan.layout) is None else "the same rank and a replica"
        yield "replays", f"every {count_of(every, 'step')}, by {who}"


def _device(device: torch.device) -> str:
    cpu = f"CPU, threads per process: {torch.get_num_threads()}"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu


def _devices(plan: Plan, device: torch.device) -> str:
    """Return the devices of all ranks and the layout: "8 × NVIDIA H100: dp 2, tp 4"."""
    ranks = plan.run.world_size
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        told = name if ranks == 1 else f"{ranks} × {name}"
    else:
        threads = count_of(torch.get_num_threads(), "thread")
        told = f"CPU, {threads}" if ranks == 1 else f"CPU, {ranks} processes of {threads}"
    return told if ranks == 1 else f"{told}: {degrees(plan)}"


def _corpus(run: Run, train: DataSplit) -> str:
    """Name what a run trains on."""
    if isinstance(train.sequences, BlendedSequences):
        return count_of(len(train.sequences.parts), "source")
    return source_option(run.data)[1]


def _cut(data: Data) -> Iterator[str]:
    """Yield what of long conversations is left out of training and validation."""
    held = (each.split.cut for each in data.validation)
    yield from filter(None, (data.train.cut, *held))


def positions_line(run: Run) -> str | None:
    """Say which rotary positions a run trains with, if they depend on the length of sequences."""
    rope, length = run.model.rope, run.train.seq_len
    if (original := rope.original_length) is None:
        return None
    longer = length > original
    what = f"those of model.longrope.{'long' if longer else 'short'}_factors"
    if rope.dynamic is not None:
        base = rope.dynamic.base(rope.theta, rope.width, length)
        what = f"their base is {base:,.0f}" if longer else "they are not scaled"
    return (
        f"{what}, as train.seq_len={length} is {'above' if longer else 'at most'} the original "
        f"length of {original} tokens"
    )


def _padding(train: DataSplit) -> str | None:
    """Say how much padding full sequences of documents get, if it is worth a line."""
    sequences = train.sequences
    if isinstance(sequences, StreamedSequences) or sequences.padding < NO_PADDING:
        return None
    said = f"{sequences.padding:.1%} of positions are padding"
    parts = sequences.parts if isinstance(sequences, BlendedSequences) else ()
    found = [sequences, *(part.sequences for part in parts)]
    whole = any(isinstance(each, BestFitSequences) for each in found)
    fewer = _fewer_padding(sequences, train.max_documents)
    if whole:
        said += ", as data.packing=best_fit cuts no document that fits"
        return f"{said}; {fewer}" if fewer else said
    said += f": a sequence ends after data.max_documents={train.max_documents} documents, also "
    return f"{said}where more would fit{f'; {fewer}' if fewer else ''}"


def _fewer_padding(
    sequences: PackedSequences | BlendedSequences, max_documents: int | None
) -> str | None:
    """Say which data.max_documents leaves less padding; None: none, or there are too many
    documents to try it.
    """
    most, best = max_documents, sequences.padding
    if most is None or sequences.documents > MOST_TRIED:
        return None
    found = most
    while (most := min(2 * most, sequences.seq_len)) > found and best >= NO_PADDING:
        share = sequences.padding_with(most)
        if best - share < NO_PADDING:
            break
        found, best = most, share
    if found == max_documents:
        return None
    return f"data.max_documents={found} leaves {best:.1%}"


def _sources(train: DataSplit) -> str | None:
    """Return what the sources of a blend are; None for one source."""
    if not isinstance(train.sequences, BlendedSequences):
        return None
    parts = train.sequences.parts
    total = sum(part.weight for part in parts)
    told = []
    for part in parts:
        size = "" if part.per_epoch is None else f" of {part.per_epoch} sequences"
        once = "" if part.repeats else ", once"
        told.append(f"{part.weight / total:.1%} {part.label}{size}{once}")
    return "; ".join(told)


def _continued(run: Run, start: Start, version: Version) -> Iterator[tuple[str, str]]:
    """Yield lines on the checkpoint that a run resumes, and on changes since it was saved."""
    if start.checkpoint and start.manifest:
        yield "resumed", f"{start.checkpoint}, after step {start.manifest['step']}"
        if run.resume != str(start.checkpoint) and (fault := fault_of_latest(start.checkpoint)):
            yield "", f"the newest whole one, as {fault}"
        program = version.change_since(start.manifest.get(VERSION))
        for change in (*start.changes, program):
            if change is not None:
                yield "changed", change
        if not start.manifest.get("data"):
            yield "data", "not compared: the checkpoint does not say what it was trained on"
    elif run.resume == "auto":
        why = "fits" if start.passed_over else "yet"
        yield "resumed", f"nothing: no checkpoint {why}, so this run starts anew"
    if run.model.init_from is not None and start.checkpoint is None:
        yield "weights", f"of {run.model.init_from}, a new optimizer"
    if start.passed_over:
        yield "passed over", start.passed_over
