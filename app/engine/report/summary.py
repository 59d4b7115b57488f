"""Print the summary of a run: sample, result, files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path

import numpy as np

from app.config import Run
from app.data.baseline import ngram_loss
from app.data.blend import BlendedSequences
from app.data.feed import DataSplit
from app.data.marks import ids_of_marked, trained
from app.data.packing import PADDING, PackedSequences
from app.engine.files.checkpoints import newest_checkpoint
from app.engine.files.run_folder import read_metrics
from app.engine.report.plot import LOSS, plot_run
from app.engine.report.trackers import TENSORBOARD
from app.engine.start.start import Data
from app.engine.step.records import ValidationReport
from app.errors import warn, writing
from app.hf.file_names import EXPORTED
from app.telling import telling

FILES = ("config.yaml", "plan.json", "metrics.jsonl", LOSS)  # written by every run
BASELINE_TOKENS = 20_000_000  # maximum of training tokens counted by the n-gram models
DECODED = 2**18  # most tokens of a validation set whose bytes are counted
MOST_EXPONENT = 700.0  # exp of it is a float
NO_PADDING = 0.001  # share of positions
MOST_TRIED = 1_000_000  # documents of a corpus that is packed anew to advise on data.max_documents
BASELINE_VOCAB = 1024  # n-gram tables of larger vocabularies are too sparse to compare with


def sum_up(
    run: Run,
    run_dir: Path,
    data: Data,
    *,
    report: ValidationReport | None,
    sample: str | None,
    advice: Sequence[str],
    off_plan: str | None = None,
) -> None:
    """Draw loss.png, and print the sample, the loss beside that of n-grams, and the files.

    Also prints `off_plan`, on steps beside their plan, and `advice` for the next run. Prints
    nothing with log.console=false.
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
    for line in _remarks(off_plan, advice):
        print(f"\n{line}")
    print("\nWritten:")
    paths = [run_dir / name for name in (*FILES, "wandb", TENSORBOARD, EXPORTED)]
    for path in (*paths, newest_checkpoint(run_dir)):
        if path is not None and path.exists():
            print(f"  {path}")


def _remarks(off_plan: str | None, advice: Sequence[str]) -> Iterator[str]:
    if off_plan is not None:
        yield f"Pace: {off_plan}"
    for each in advice:
        yield f"Next time: {each}"


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
