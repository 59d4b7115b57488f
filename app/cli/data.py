"""Show what training reads: `python -m app.cli.data inspect` with the overrides of train.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from textwrap import wrap

from app.cli.processes.ctrl_c import stop_quietly

if __name__ == "__main__":
    stop_quietly("data")  # before the imports, which take a second

import numpy as np

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.options.messages import readable_errors
from app.cli.options.request import Words
from app.cli.processes.output import exit_by, table_width
from app.data.blend import BlendReader
from app.data.corpora import Corpora, all_left_out, load_all, prepare_all
from app.data.feed import IGNORED, DataSplit, make_batch, make_marked_batch
from app.data.marks import ends, ids_of_marked, trained
from app.data.packing import PADDING, PackedSequences
from app.data.tokenizer import Tokenizer
from app.engine.start.start import check_tokenizer
from app.errors import ConfigError, warn
from app.plan.formatting import count_of
from app.programs import with_names

INSPECT = "inspect"
OWN = ("--sequence", "--over")
OVER = 100  # by default
WIDTH = 100  # columns unless the terminal or COLUMNS says otherwise
HELP = """\
== Graphfold: show what training reads ==
Usage:  python -m app.cli.data inspect [--sequence N] [--over N] [override …]

  --sequence N  the N-th sequence of the run, from 0: its documents with their first words, where
                they end, which tokens have a loss, and padding; conversations in full, « » around
                what is trained
  --over N      sequences that the shares of padding and of tokens with a loss are taken from;
                default: 100
  override      any override of train.py

Documents are tokenized into the cache, as a start of the run does; no model is built.

Examples:
  python -m app.cli.data inspect +experiment=smoke --sequence 3
  python -m app.cli.data inspect data=text data.path='texts/*.txt' data.document_mask=true"""


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """The command line."""

    sequence: int
    over: int
    typed: Typed  # overrides that describe the run

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> InspectRequest:
        """Separate this command's own options from overrides. Raises ConfigError."""
        if not arguments or arguments[0] != INSPECT:
            word = arguments[0] if arguments else ""
            raise ConfigError("command", word, f"must be {INSPECT}")
        words = Words.of_flags(arguments[1:], OWN, "data")
        return cls(
            words.whole("--sequence", 0, least=0),
            words.whole("--over", OVER),
            typed=Typed.parse(words.overrides),
        )


@dataclass(frozen=True, slots=True)
class SequencePart:
    """A document, or part of one, in a sequence; or its padding."""

    start: int
    stop: int  # behind its last token
    losses: int  # of its tokens
    ends: bool  # with the end-of-document token
    ids: list[int]  # none: padding
    trained: list[bool] | None = None  # of a conversation, each token


@dataclass(frozen=True, slots=True)
class Shares:
    """Sums over several sequences."""

    sequences: int = 0
    padding: int = 0  # positions
    losses: int = 0
    parts: int = 0

    def __add__(self, other: Sequence[SequencePart]) -> Shares:
        padding = sum(part.stop - part.start for part in other if not part.ids)
        losses = sum(part.losses for part in other)
        documents = sum(bool(part.ids) for part in other)
        return Shares(
            self.sequences + 1,
            self.padding + padding,
            self.losses + losses,
            parts=self.parts + documents,
        )


def parts_of(row: np.ndarray, dataset: DataSplit, eod: int) -> list[SequencePart]:
    """What a sequence of S + 1 tokens is made of, by the microbatch that training makes of it."""
    make = make_marked_batch if dataset.marked else make_batch
    batch = make([row], dataset.boundary, dataset.max_documents)
    loss_S = batch.labels_BS[0].numpy() != IGNORED
    tokens_S = ids_of_marked(row[:-1])
    held = int((tokens_S != PADDING).sum())
    ends_S = ends(row[:-1], eod)
    places = np.flatnonzero(ends_S[:held]) + 1
    borders = sorted({0, *places.tolist(), held, len(tokens_S)})
    trained_S = trained(row[:-1])
    return [
        SequencePart(
            start,
            stop,
            int(loss_S[start:stop].sum()),
            ends=bool(ends_S[stop - 1]),
            ids=tokens_S[start:stop].tolist() if start < held else [],
            trained=trained_S[start:stop].tolist() if row[start] < PADDING else None,
        )
        for start, stop in pairwise(borders)
    ]


def lines_of(parts: Sequence[SequencePart], tokenizer: Tokenizer, width: int) -> Iterator[str]:
    """A table of the parts, in lines of at most `width` columns."""
    yield "   tokens     loss  end  begins with"[:width]
    for part in parts:
        place = f"{part.start}-{part.stop - 1}"
        head = f"{place:>9}  {part.losses:>7,}  {'yes' if part.ends else '':>3}  "
        room = max(8, width - len(head))
        if part.trained is not None:
            yield from _conversation(part, tokenizer, head, room=room)
            continue
        text = " ".join(tokenizer.decode(part.ids[: 4 * room]).split()) if part.ids else "(padding)"
        yield head + (text if len(text) <= room else text[: room - 1] + "…")


def _conversation(part: SequencePart, tokenizer: Tokenizer, head: str, room: int) -> Iterator[str]:
    """The whole text of a conversation behind the head of its line, « » around what is trained."""
    assert part.trained is not None
    names = {number: name for name, number in tokenizer.special.items()}
    text = ""
    for is_trained, run in groupby(zip(part.ids, part.trained, strict=True), itemgetter(1)):
        found = "".join(
            "".join(names[number] for number, _ in some)
            if is_special
            else tokenizer.decode([number for number, _ in some])
            for is_special, some in groupby(run, lambda token: token[0] in names)
        )
        text += f"«{found}»" if is_trained else found
    lines = [piece for line in text.splitlines() for piece in wrap(line, room)]
    yield head + lines[0]
    yield from (" " * len(head) + line for line in lines[1:])


def inspect(asked: InspectRequest) -> Iterator[str]:
    """Yield what is printed. Raises ConfigError for what training would refuse."""
    say = partial(warn, program="data")
    run = load_typed(asked.typed)
    tokenizer = check_tokenizer(run)
    found_data = Corpora.find(run.data)
    folders = prepare_all(run.data, tokenizer, found_data, say=say)
    for line in all_left_out(folders, found_data):
        say(line)
    length = run.train.seq_len
    dataset, _ = load_all(run.data, length, run.train.seed, tokenizer=tokenizer, folders=folders)
    if dataset.cut:
        say(dataset.cut)
    sequences = dataset.sequences
    reader = sequences.reader(run.dp, run.train.micro_batch, 0, None)
    shares, shown, source = Shares(), list[SequencePart](), ""
    for index in range(max(asked.over, asked.sequence + 1)):
        # Streams and blends give their sequences in order only; of others, unused ones are skipped.
        if isinstance(sequences, PackedSequences) and asked.over <= index != asked.sequence:
            continue
        found = parts_of(reader.sample(index), dataset, tokenizer.eod)
        if index < asked.over:
            shares += found
        if index == asked.sequence:
            shown = found
            source = (
                f" (source {reader.parts[reader.source].label})"
                if isinstance(reader, BlendReader)
                else ""
            )
    of = ""
    if isinstance(sequences, PackedSequences):
        of = f" of {sequences.per_epoch:,} in the first epoch"
    yield f"sequence {asked.sequence:,}{of}{source}: {length:,} tokens"
    width = table_width(sys.stdout, WIDTH)
    yield from lines_of(shown, tokenizer, width)
    positions = shares.sequences * length
    yield ""
    yield f"{count_of(shares.sequences, 'sequence')} from 0 on:"
    yield f"{shares.padding / positions:8.1%}  padding"
    yield f"{shares.losses / positions:8.1%}  tokens with a loss"
    yield f"{shares.parts / shares.sequences:8.1f}  documents per sequence"


def main(arguments: Sequence[str]) -> int:
    """Print what was asked for; return the exit code."""
    if {"--help", "-h"} & set(arguments):
        print(with_names(HELP))
        return 0
    with readable_errors("data", speak=True):
        for line in inspect(InspectRequest.parse(arguments)):
            print(line)
    return 0


if __name__ == "__main__":
    exit_by(main)
