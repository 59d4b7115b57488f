"""What a person reads before and after training: the plan in a few lines, the sample, the result and where it lies."""

from __future__ import annotations

from pathlib import Path

import torch

from app.config import Run
from app.data.baseline import ngram_loss
from app.data.feed import DataSplit
from app.data.packing import PackedSequences
from app.data.tokenizer import Tokenizer
from app.engine.build import Engine
from app.engine.plot import plot_run
from app.engine.report import ValidationReport
from app.engine.run_folder import newest_checkpoint
from app.plan.summary import summary_lines

BASELINE_TOKENS = 20_000_000  # most training tokens that the n-gram models count
BASELINE_VOCAB = 1024  # larger vocabularies make an n-gram table that says little


def print_opening(run: Run, engine: Engine, run_dir: Path, from_step: int) -> None:
    """The plan of the run, its device and its folder."""
    device = (
        torch.cuda.get_device_name(engine.device)
        if engine.device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads per process"
    )
    for name, text in (*summary_lines(run), ("device", device), ("folder", str(run_dir))):
        print(f"{name:>12}  {text}")
    if from_step:
        print(f"{'resumed':>12}  after step {from_step}")
    print(flush=True)


def print_summary(
    run: Run,
    run_dir: Path,
    tokenizer: Tokenizer,
    train: DataSplit,
    validation: DataSplit,
    report: ValidationReport | None,
    sample: str | None,
) -> None:
    """The sample, the loss beside what counting n-grams reaches, and the files."""
    if sample is not None:
        print(f"\nSample (the model continues after ▶):\n{sample}")
    baselines = ngram_baselines(tokenizer, train, validation)
    picture = plot_run(run_dir, baselines)
    print("\nResult, nats per token on the validation split:")
    rows = {"this model": report.val_loss} if report else {}
    for name, value in (rows | baselines).items():
        print(f"  {name:<12}{value:7.3f}")
    print("\nWritten:")
    files = [
        run_dir / "config.yaml",
        run_dir / "metrics.jsonl",
        picture,
        newest_checkpoint(run_dir),
        run_dir / "wandb" if run.log.wandb else None,
    ]
    for path in files:
        if path is not None:
            print(f"  {path}")


def ngram_baselines(tokenizer: Tokenizer, train: DataSplit, validation: DataSplit) -> dict[str, float]:
    """Validation loss of a bigram and a trigram model counted on the training split; empty for streams and large vocabularies."""
    sources = (train.sequences, validation.sequences)
    if tokenizer.vocab_size > BASELINE_VOCAB or not all(isinstance(source, PackedSequences) for source in sources):
        return {}
    seen, held_out = (source.tokens(BASELINE_TOKENS) for source in sources if isinstance(source, PackedSequences))
    return {name: ngram_loss(seen, held_out, order) for name, order in (("bigram", 2), ("trigram", 3))}
