"""Print the opening (plan, device, folder) and the summary (sample, result, files) of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path

import numpy as np
import torch

from app.config import Run
from app.data.baseline import ngram_loss
from app.data.best_fit import BestFitSequences
from app.data.blend import BlendedSequences
from app.data.feed import DataSplit
from app.data.marks import ids_of_marked, trained
from app.data.packing import PADDING, PackedSequences
from app.data.stream import StreamedSequences
from app.engine.fast_paths import graphs_line, slow_paths
from app.engine.files.checkpoints import fault_of_latest, newest_checkpoint
from app.engine.files.run_folder import read_metrics
from app.engine.fp8 import fp8_line
from app.engine.ranks.dtypes import DTYPES
from app.engine.report.pace import pace_line
from app.engine.report.plot import LOSS, plot_run
from app.engine.report.trackers import TENSORBOARD
from app.engine.start.start import Data, Start
from app.engine.step.engine import Engine
from app.engine.step.records import ValidationReport
from app.errors import warn, writing
from app.hf.file_names import EXPORTED
from app.model.attention.chosen import attention_line
from app.planner.summary import memory_line, summary_lines
from app.telling import telling
from app.version import VERSION, Version

FILES = ("config.yaml", "plan.json", "metrics.jsonl", LOSS)  # written by every run
BASELINE_TOKENS = 20_000_000  # maximum of training tokens counted by the n-gram models
DECODED = 2**18  # most tokens of a validation set whose bytes are counted
MOST_EXPONENT = 700.0  # exp of it is a float
NO_PADDING = 0.001  # share of positions
MOST_TRIED = 1_000_000  # documents of a corpus that is packed anew to advise on data.max_documents
BASELINE_VOCAB = 1024  # n-gram tables of larger vocabularies are too sparse to compare with


def print_opening(
    engine: Engine,
    run_dir: Path,
    start: Start,
    *,
    data: Data,
    version: Version,
    settings: str | None,
) -> None:
    """Print the run's plan, device, folder, the checkpoint it resumes, and known slow paths.

    `settings` names the run whose settings it took, if any.
    """
    run = engine.plan.run
    cpu = f"CPU, threads per process: {torch.get_num_threads()}"
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else cpu
    rows = [*summary_lines(engine.plan), ("device", device), ("folder", str(run_dir))]
    if engine.device.type == "cuda":
        memory = torch.cuda.get_device_properties(engine.device).total_memory
        rows.append(("memory", memory_line(engine.plan, memory)))
    if engine.recorder is not None:
        rows.append(("graphs", graphs_line(run, engine.device)))
    if run.precision.fp8.recipe is not None:
        rows.append(("fp8", fp8_line(run, engine.device)))
    if positions := positions_line(run):
        rows.append(("positions", positions))
    if attention := attention_line(run, DTYPES[run.precision.params], engine.device):
        rows.append(("attention", attention))
    if pace := pace_line(engine.plan, engine.device):
        rows.append(("planned", pace))
    rows += slow_paths(run, engine.device, engine.static)
    held = (each.split.cut for each in data.validation)
    said = (_sources(data.train), _padding(data.train), data.train.cut, *held)
    rows += [("data", line) for line in said if line]
    if run.model.moe and run.model.moe.force_balance:
        rows.append(
            ("WARNING", "model.moe.force_balance sends tokens to experts in turn: for timing only")
        )
    rows += [("settings", settings)] if settings is not None else []
    rows += _continued(run, start, version)
    for name, text in rows:
        print(f"{name:>12}  {text}")
    print(flush=True)


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


def sum_up(
    run: Run,
    run_dir: Path,
    data: Data,
    *,
    report: ValidationReport | None,
    sample: str | None,
    advice: Sequence[str],
) -> None:
    """Draw loss.png, and print the sample, the loss beside that of n-grams, and the files.

    Also prints `advice` for the next run. Prints nothing with log.console=false.
    """
    with telling("counting n-grams and drawing loss.png", aloud=run.log.console), writing(run_dir):
        baselines = ngram_baselines(run, data)
        _draw(run_dir, baselines)
    if not run.log.console:
        return
    if sample is not None:
        print(f"\nSample (the model continues after ▶):\n{sample}")
    print("\nResult, nats per token on the validation data:")
    size = bytes_per_token(run, data)

    def row(name: str, value: float) -> None:
        print(f"  {name:<12}{value:7.3f}{_in_other_units(value, size)}")

    if report:
        row("this model", report.val_loss)
        for line in _details(run, run_dir, report):
            print(line)
    for name, value in baselines.items():
        row(name, value)
    for each in advice:
        print(f"\nNext time: {each}")
    print("\nWritten:")
    paths = [run_dir / name for name in (*FILES, "wandb", TENSORBOARD, EXPORTED)]
    for path in (*paths, newest_checkpoint(run_dir)):
        if path is not None and path.exists():
            print(f"  {path}")


def _details(run: Run, run_dir: Path, report: ValidationReport) -> Iterator[str]:
    for label, value in report.by_source.items():
        yield f"    {label:<10}{value:7.3f}"
    if change := change_line(run, run_dir, report):
        yield f"  {change}"


def change_line(run: Run, run_dir: Path, report: ValidationReport) -> str | None:
    """Return the validation losses before the first step and after the last of a run that started
    from a published model; None for others, or if the folder has no first one.
    """
    if run.model.init_from is None or not report.step:
        return None
    rows = [row for row in read_metrics(run_dir) if row["step"] == 0 and "val_loss" in row]
    return f"validation loss {rows[-1]['val_loss']:.4f} → {report.val_loss:.4f}" if rows else None


def _in_other_units(loss: float, bytes_per_token: float) -> str:
    """Return perplexity and bits per byte of a loss in nats per token."""
    bits = f", {loss / log(2) / bytes_per_token:.3f} bits per byte" if bytes_per_token else ""
    return f"   perplexity {exp(min(loss, MOST_EXPONENT)):.4g}{bits}"


def _draw(run_dir: Path, baselines: dict[str, float]) -> None:
    """Draw loss.png; a failure of matplotlib only warns, since training is complete.

    Raises OSError.
    """
    try:
        plot_run(run_dir, baselines)
    except OSError:
        raise
    except Exception as error:
        warn(f"{run_dir / LOSS} could not be drawn: {error!r}; all else of the run is complete")


def ngram_baselines(run: Run, data: Data) -> dict[str, float]:
    """Return validation losses of a bigram and a trigram model counted on the training split.

    Empty for streams, conversations and large vocabularies.
    """
    train = data.train.sequences
    parts = train.parts if isinstance(train, BlendedSequences) else None
    packed = [part.sequences for part in parts] if parts else [train]
    chat = any(split.marked for split in (data.train, *(held.split for held in data.validation)))
    if chat or data.tokenizer.vocab_size > BASELINE_VOCAB:
        return {}
    weights = [part.weight for part in parts] if parts else [1.0]
    seen = []
    for sequences, weight in zip(packed, weights, strict=True):
        if not isinstance(sequences, PackedSequences):
            return {}
        seen.append(sequences.tokens(int(BASELINE_TOKENS * weight / sum(weights))))
    counted = np.concatenate(seen)
    total = sum(held.weight for held in data.validation)
    found = dict.fromkeys(("bigram", "trigram"), 0.0)
    for held in data.validation:
        tokens = _validation_tokens(run, held.split)
        for order, name in enumerate(found, 2):
            found[name] += held.weight / total * ngram_loss(counted, tokens, order)
    return found


def _validation_tokens(run: Run, split: DataSplit) -> np.ndarray:
    """Return the tokens of a validation split that a run is validated on, of conversations the
    trained ones: [T].
    """
    sequences = split.sequences
    assert isinstance(sequences, PackedSequences), "validation data are never streamed"
    count = min(run.train.eval_sequences, sequences.per_epoch)
    held_out = np.concatenate([sequences.sample(index) for index in range(count)])
    tokens: np.ndarray = held_out[held_out != PADDING]
    if split.marked:
        tokens = ids_of_marked(tokens[trained(tokens)])
    return tokens


def bytes_per_token(run: Run, data: Data) -> float:
    """Return the bytes of text per token of the validation data, as their losses count; 0 if
    none has a loss.
    """
    found = 0.0
    for held in data.validation:
        tokens = _validation_tokens(run, held.split)[:DECODED]
        if not len(tokens):
            return 0.0
        found += held.weight * len(data.tokenizer.decode(tokens.tolist()).encode()) / len(tokens)
    return found / sum(held.weight for held in data.validation)
