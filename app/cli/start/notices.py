"""Notice choices that a start carries out as typed, but that are seldom meant."""

from __future__ import annotations

from collections.abc import Iterator

from app.advice.elastic import told
from app.choices import Dtype, Source
from app.cli.options.arguments import Typed, key_of
from app.cli.options.continued import RunSettings
from app.cli.processes.home import CONF
from app.cli.start.overlaid import overlaid
from app.config import OptimConfig, Run, TrainConfig
from app.errors import ConfigError
from app.errors import typed as as_typed
from app.hf.adapter_names import AdapterNames

RATE = "optim.lr"
FINE_TUNING = ("finetune", "finetune_lora")
TRIALS = ("moe_tiny", "dense_tiny", "pretrained")  # options of model that the defaults suit
MANY_TOKENS = 1e9  # the standard library has a few hundredths of that
WHOLE_RUNS = {"small": "pretrain_small", "deepseek_v3_like": "deepseek_v3_2048"}  # others: as named


def notices(run: Run, typed: Typed, *, trains: bool = True) -> Iterator[str]:
    """Yield the lines that a start, or a plan (not `trains`), says about what was typed."""
    yield from overlaid(typed)
    if RunSettings.of(typed) is None:  # a run that is continued keeps what it was begun with
        yield from usual_rate(run, typed)
        yield from chosen_alone(run, typed)
    yield from told(run)
    if trains:
        yield from trial_data(run)
        yield from kept_adapters(run)


def usual_rate(run: Run, typed: Typed) -> Iterator[str]:
    """Yield a line for a run that starts from a model and leaves the learning rate to the default;
    none if it was typed, or chosen by an experiment.
    """
    if run.model.init_from is None or run.optim.lr != OptimConfig().lr:
        return
    if RATE in map(key_of, typed.overrides):
        return
    named = " or ".join(f"+experiment={name}" for name in FINE_TUNING)
    yield (
        f"{RATE}={as_typed(run.optim.lr)} is the default, for random weights, and far too high for "
        f"those of model.init_from: type {RATE} and optim.min_lr, or begin with {named}"
    )


def chosen_alone(run: Run, typed: Typed) -> Iterator[str]:
    """Yield a line for a large model whose precision and length of sequences are left to the
    defaults, which are those of short trials.
    """
    model, length = run.model.name, TrainConfig().seq_len
    if run.precision.params is not Dtype.float32 or run.train.seq_len != length:
        return
    if model in TRIALS or not (CONF / "model" / f"{model}.yaml").is_file():
        return
    if any(key.startswith(("precision", "train.seq_len")) for key in map(key_of, typed.overrides)):
        return
    line = f"model={model} alone trains in fp32 on sequences of {length} tokens, the defaults: "
    experiment = WHOLE_RUNS.get(model, model)
    if (CONF / "experiment" / f"{experiment}.yaml").is_file():
        yield f"{line}+experiment={experiment} sets a whole run of it"
    else:
        yield f"{line}type precision=bf16 train.seq_len=4096, for example"


def kept_adapters(run: Run) -> Iterator[str]:
    """Yield a line for a run whose adapters have no files of `peft`."""
    if run.lora.rank is not None:
        try:
            AdapterNames.of(run.model, run.lora, "lora.rank", run.lora.rank)
        except ConfigError as error:
            yield f"lora.rank={run.lora.rank}: nothing exports these adapters: {error.rule}"


def trial_data(run: Run) -> Iterator[str]:
    """Yield a line for a long run that is left with the default documents, which are few."""
    if run.data.sources or run.data.source is not Source.stdlib:
        return
    tokens = run.steps * run.train.global_batch * run.train.seq_len
    if tokens >= MANY_TOKENS:
        yield (
            f"{tokens / 1e9:.3g} billion tokens of data=stdlib, the default, are the same few "
            "files many times over: give documents, like data=jsonl data.path=corpus.jsonl"
        )
