"""Perplexity and multiple-choice accuracy of a trained model:
`python -m app.cli.evaluate RUN_OR_CHECKPOINT data.path=…`.

Results go to stdout, everything else to stderr. Exit codes: 0; 2 for a mistake of the user,
reported in one line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.cli.processes.ctrl_c import stop_quietly
from app.cli.processes.environment import environment

if __name__ == "__main__":
    # before the imports, which take seconds: Ctrl-C meanwhile prints one line
    stop_quietly("evaluate", speak=environment().get("RANK", "0") == "0")

from hydra.core.override_parser.overrides_parser import OverridesParser

from app.choices import Source
from app.cli.options.request import Words, check_characters, text_lines
from app.cli.options.saved import saved_run
from app.cli.processes.launcher import Launch
from app.cli.start.launch import check_room
from app.cli.start.program import run_program
from app.cli.start.ranks import start_ranks
from app.cli.start.use_model import loaded_model
from app.config import Run
from app.data.faults import Fault
from app.data.load import prepare
from app.data.marks import ids_of_marked, trained
from app.data.prepared import check_ends, left_out, map_tokens
from app.data.sources import find_sources
from app.data.tokenizer import Tokenizer
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.model_tokens import prefix_token
from app.engine.decoding.scoring import (
    Accuracy,
    Perplexity,
    Question,
    ScoredWindow,
    accuracy,
    perplexity,
    windows,
)
from app.engine.decoding.trained import TrainedModel, WeightSource, weights_at
from app.engine.ranks.agreement import rank_zero_says
from app.engine.start.kept_tokenizer import changed_end
from app.engine.start.start import check_tokenizer, usable_gpus
from app.errors import ConfigError, say
from app.plan.formatting import count_of
from app.telling import telling

OWN = ("choices", "stride", "batch")
# suffixes of files that are not plain text, and how they are read
KINDS = {
    ".jsonl": Source.jsonl,
    ".ndjson": Source.jsonl,
    ".json": Source.jsonl,
    ".parquet": Source.parquet,
    ".pq": Source.parquet,
    ".bin": Source.megatron,
    ".idx": Source.megatron,
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
HELP = """\
== Graphfold: score texts with a trained model ==
Usage:  python -m app.cli.evaluate RUN_OR_CHECKPOINT data.path=PATH [option …] [override …]
        python -m app.cli.evaluate RUN_OR_CHECKPOINT choices=PATH [option …] [override …]

  RUN_OR_CHECKPOINT  a run folder (its newest checkpoint is used), a checkpoint saved at any
                     layout, or the folder of a Hugging Face model
  data.path=PATH     perplexity of documents; a list or globs, as in training. Read with the run's
                     data.source and data.text_field; if the run was trained on the standard
                     library or the hub, by suffix: .jsonl, .json, .parquet, otherwise as text
  data.source=KIND   text, jsonl, parquet, megatron or chat, instead of the run's; of
                     conversations, what the assistant says is scored
  stride=N           documents longer than the context (train.seq_len) are cut into windows that
                     start N tokens apart; every token counts once; default: half the context
  choices=PATH       multiple choice: one JSON object per line, with "prompt", "choices" (possible
                     continuations) and "answer" (index of the right one, from 0)
  batch=8            windows per forward pass
  override           any key of the configuration: train.device=cpu, parallel.tp=2,
                     precision.params=bfloat16, train.seq_len=N

One process by default; parallel.tp=2 and the like start as many as they need."""


@dataclass(frozen=True, slots=True)
class Task:
    """The checked request: run, tokenizer and texts or questions to score. Loads no model."""

    run: Run
    tokenizer: Tokenizer
    stride: int
    batch: int
    questions: tuple[Question, ...] | None  # None asks for the perplexity of documents
    prefix: int  # token in front of choices that have no prompt

    @classmethod
    def of(cls, words: Words, source: WeightSource, world_size: int | None) -> Task:
        """Check the command line against the run at `source`. Raises ConfigError."""
        named = any(word.startswith("data.path=") for word in words.overrides)
        path = words.text("choices")
        if named == bool(path):
            rule = "a call scores either documents or questions"
            raise ConfigError("data.path", "", rule, advice="give data.path=PATH or choices=PATH")
        read = read_as(words, Source(source.config["data"].get("source", "stdlib")))
        run = saved_run(source.config, [*read, *words.overrides], world_size)
        tokenizer = check_tokenizer(run, source.manifest)
        context = run.train.seq_len
        stride = words.whole("stride", max(1, context // 2))
        if stride >= context:
            rule = f"must be below the context, train.seq_len={context}"
            raise ConfigError("stride", stride, rule, nearest=max(1, context // 2))
        prefix = prefix_token(source.texts, tokenizer) if path else tokenizer.eod
        questions = read_questions(Path(path), tokenizer, context, prefix=prefix) if path else None
        batch = words.whole("batch", 8)
        return cls(run, tokenizer, stride, batch, questions=questions, prefix=prefix)

    def prepared(self) -> Path:
        """Return the folder of the tokenized documents, tokenizing them unless an earlier call has.
        Raises ConfigError.
        """
        folder = prepare(self.run.data, self.tokenizer, say=_note)
        assert folder is not None, "files are prepared, not streamed"
        check_ends(folder, "evaluate")
        return folder

    def left_out(self) -> str | None:
        """Return a line that names files left out; None if all are scored. Raises ConfigError."""
        return left_out(self.prepared(), find_sources(self.run.data))

    def counted(self) -> int:
        """Return the number of scored tokens: all but each document's first token and its
        end-of-document token; of conversations, what the assistant says. Raises ConfigError.
        """
        if self.run.data.source is Source.chat:
            return sum(window.counted for window in self.documents())
        lengths_D = map_tokens(self.prepared()).lengths_D
        return sum(max(0, int(length) - 2) for length in lengths_D)

    def documents(self) -> Iterator[ScoredWindow]:
        """Yield the windows of all documents, without their end-of-document tokens. Raises
        ConfigError.
        """
        found, chat = map_tokens(self.prepared()), self.run.data.source is Source.chat
        for number, length in enumerate(found.lengths_D):
            tokens = found.read(number, 0, int(length) if chat else int(length) - 1)
            said = trained(tokens).tolist() if chat else None
            ids = ids_of_marked(tokens).tolist()
            yield from windows(ids, self.run.train.seq_len, self.stride, said)


def read_as(words: Words, own: Source) -> list[str]:
    """Return the overrides that say how documents are read: as in the run, whose source is `own`,
    unless data.source is typed. Raises ConfigError if the suffixes of the files contradict it.
    """
    keys = [word.partition("=")[0] for word in words.overrides]
    if "data.path" not in keys:
        return []
    alone = ["data.streaming=false", "data.sources=[]", "data.validation=[]", "data.name=null"]
    of_chat = ["data.chat_template=null", "data.truncate=right"]
    if "data.source" in keys:
        chat = [word for word in words.overrides if word.startswith("data.source=")][-1]
        return alone if chat == f"data.source={Source.chat.value}" else [*alone, *of_chat]
    of_files = own not in (Source.stdlib, Source.hub)
    named = {_kind(path) for path in _paths(words.overrides)}
    kinds = named - {None}
    if len(named) > 1 and not of_files:
        rule = "has files of several kinds (text, jsonl, parquet, …), and a call reads one kind"
        raise ConfigError("data.path", _typed(words), rule, advice="give files of one kind")
    found = next((kind for kind in kinds if kind is not None), Source.text)
    if own is Source.text and kinds:
        rule = f"is {found.value} by its name, but the run was trained on data.source=text"
        advice = f"type data.source={found.value} or data.source=text"
        raise ConfigError("data.path", _typed(words), rule, advice=advice)
    kind = own if of_files else found
    return [f"data.source={kind.value}", *alone, *(() if kind is Source.chat else of_chat)]


def _paths(overrides: Sequence[str]) -> list[str]:
    """Return the paths of the last data.path, the one that counts."""
    given = [word for word in overrides if word.startswith("data.path=")]
    value = OverridesParser.create().parse_override(given[-1]).value()
    return list(map(str, value)) if isinstance(value, list) else [str(value)]


def _typed(words: Words) -> str:
    return " ".join(_paths(words.overrides))


def _kind(path: str) -> Source | None:
    """Return the kind of a file by its suffix; None unless it is jsonl or parquet."""
    name = Path(path.lower())
    return KINDS.get((name.with_suffix("") if name.suffix in COMPRESSED else name).suffix)


def read_questions(
    path: Path, tokenizer: Tokenizer, context: int, *, prefix: int
) -> tuple[Question, ...]:
    """Read the questions of a file; `prefix` is explained at `Question.windows`. Raises ConfigError
    for a line without a question, and for a question longer than the context.
    """
    try:
        lines = text_lines(path)
    except Fault as fault:
        raise ConfigError("choices", path, fault.rule, advice=fault.advice) from fault
    except OSError as error:
        raise ConfigError("choices", path, f"cannot be read: {error.strerror}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError("choices", path, "contains no question")
    found = []
    for number, line in numbered:
        question = _question(path, number, line)
        for window in question.windows(tokenizer, prefix):
            if len(window.tokens) - 1 > context:  # no token follows the last one
                rule = f"line {number} has {len(window.tokens)} tokens with a choice, and the "
                raise ConfigError("choices", path, f"{rule}context is train.seq_len={context}")
            if window.counted < 1:
                rule = f"line {number} has a choice that adds no token to the prompt"
                raise ConfigError("choices", path, rule)
        found.append(question)
    return tuple(found)


def _question(path: Path, number: int, line: str) -> Question:
    try:
        row: Any = json.loads(line)
    except ValueError:
        row = None
    row = row if isinstance(row, dict) else {}
    match row.get("prompt"), row.get("choices"), row.get("answer"):
        case _, _, bool():
            pass
        case str() as prompt, [str(), str(), *_] as choices, int() as answer if all(
            isinstance(choice, str) and choice for choice in choices
        ) and 0 <= answer < len(choices):
            for text in (prompt, *choices):
                check_characters("choices", path, text, f"line {number} ")
            return Question(prompt, tuple(choices), answer)
    rule = (
        f'line {number} must be a JSON object with "prompt" (a string), "choices" (two or more '
        'strings that are not empty) and "answer" (index of one of them, from 0)'
    )
    raise ConfigError("choices", path, rule)


def _note(line: str) -> None:
    say(f"evaluate: {line}", sys.stderr)


def _decoder(model: TrainedModel, task: Task, most: int) -> Decoder:
    """Return a decoder for one batch of windows, of which there are at most `most` in all."""
    batch = min(task.batch, max(1, most))
    return Decoder(model, -(-batch // model.groups.layout.dp), 0)


def score(model: TrainedModel, task: Task) -> Accuracy | Perplexity:
    """Compute perplexity of documents, or accuracy of answers. All ranks call it."""
    done = [0]
    aloud = model.groups.rank == 0
    if task.questions is not None:
        of = sum(len(question.choices) for question in task.questions)
        decoder = _decoder(model, task, of)
        with telling(
            "scoring", lambda: f"{done[-1]:,} of {of:,} choices", aloud=aloud, stream=sys.stderr
        ):
            return accuracy(
                decoder, task.questions, task.tokenizer, done.append, prefix=task.prefix
            )
    of = rank_zero_says(model.groups, task.counted)
    if aloud and (line := task.left_out()):
        _note(line)
    decoder = _decoder(model, task, of)
    with telling(
        "scoring", lambda: f"{done[-1]:,} of {of:,} tokens", aloud=aloud, stream=sys.stderr
    ):
        known = perplexity(decoder, task.documents(), done.append)
    if not known.tokens:
        rule = "no document has more than one token, so there is nothing to predict"
        raise ConfigError("data.path", " ".join(task.run.data.path), rule)
    return known


def told(found: Accuracy | Perplexity, task: Task) -> str:
    """Return the line to print."""
    if isinstance(found, Accuracy):
        return (
            f"accuracy {found.plain:.4f}, length-normalised {found.normalised:.4f}, of "
            f"{count_of(found.questions, 'question')}"
        )
    return (
        f"perplexity {found.perplexity:.4f}, {found.per_token:.5f} nats per token, of "
        f"{count_of(found.tokens, 'token')}; context {task.run.train.seq_len:,}, stride "
        f"{task.stride:,}"
    )


def evaluate(arguments: Sequence[str], launch: Launch) -> int:
    """Score on this rank, or start the ranks that the layout asks for; return the exit code."""
    words = Words.parse(arguments, OWN)
    source = weights_at(words.source)
    task = Task.of(words, source, launch.world_size)
    run = task.run
    note = changed_end(source.manifest, run.data.tokenizer, kept=False)
    if note is not None and launch.rank == 0 and (launch.world_size or run.world_size == 1):
        _note(note)
    if launch.world_size is None and task.questions is None:
        task.prepared()  # so that a bad file is reported before the model is loaded
    if launch.world_size is None and run.world_size > 1:
        check_room(run, usable_gpus(run))
        return start_ranks(run.world_size, __file__, arguments, env=environment())
    with loaded_model(source, run, launch) as model:
        found = score(model, task)
        if launch.rank == 0:
            print(told(found, task), flush=True)
    return 0


def main(arguments: Sequence[str], parent: int) -> int:
    """Run the command line of this process, started by process `parent`; return the exit code."""
    return run_program("evaluate", HELP, arguments, parent=parent, work=evaluate)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.getppid()))
