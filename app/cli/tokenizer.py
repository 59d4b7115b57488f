"""Train a tokenizer: `python -m app.cli.tokenizer` with the overrides of train.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.cli.processes.ctrl_c import stop_quietly

if __name__ == "__main__":
    stop_quietly("tokenizer")  # before the imports, which take a second

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.options.messages import readable_errors
from app.cli.options.request import Words
from app.cli.processes.output import exit_by
from app.data.train_tokenizer import END, Wanted, trained
from app.errors import ConfigError
from app.plan.formatting import amount, count_of
from app.programs import command_name, with_names
from app.shell import shell_line

OWN = ("--out", "--size", "--special", "--bytes")
SIZE, BYTES = 8192, 10**9  # by default
HELP = """\
== Graphfold: train a tokenizer ==
Usage:  python -m app.cli.tokenizer --out FOLDER [--size N] [--special A,B] [--bytes N] [override …]

  --out FOLDER   folder for tokenizer.json and tokenizer_config.json; data.tokenizer=FOLDER reads it
  --size N       ids, all kinds of tokens together; default: 8192
  --special A,B  further special tokens, such as '<|im_start|>,<|im_end|>'
  --bytes N      most bytes of text to read; default: 1e9. Sources get shares by their weights
  override       any override of train.py; those of data name the texts

Byte-level BPE, as of GPT-2 and Llama 3. One document of a hundred is left out, and measures the
bytes per token.

Examples:
  python -m app.cli.tokenizer --out tok data=text data.path='texts/*.txt' --size 1024
  python -m app.cli.tokenizer --out tok data.sources='[{path: a, weight: 2}, {path: b.jsonl}]'"""


@dataclass(frozen=True, slots=True)
class TokenizerRequest:
    """The command line."""

    out: Path
    wanted: Wanted
    words: tuple[str, ...]  # overrides, as typed

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> TokenizerRequest:
        """Separate this command's own options from overrides. Raises ConfigError."""
        words = Words.of_flags(arguments, OWN, "tokenizer")
        out = words.text("--out")
        if not out:
            raise ConfigError("--out", "", "the folder of the new tokenizer is missing")
        listed = next(reversed(words.texts("--special")), "")
        special = tuple(token for token in listed.split(",") if token)
        wanted = Wanted(_count(words, "--size", SIZE), special, _count(words, "--bytes", BYTES))
        return cls(Path(out), wanted, words=words.overrides)


def _count(words: Words, key: str, default: int) -> int:
    """Return an option that may be typed as 1e9. Raises ConfigError."""
    found = float(words.number(key, default))
    if found < 1 or not found.is_integer():
        raise ConfigError(key, words.text(key), "must be a whole number from 1 on", default)
    return int(found)


def lines(asked: TokenizerRequest) -> Iterator[str]:
    """Train and write the tokenizer; yield what is printed. Raises ConfigError."""
    # texts are read without a tokenizer, and a vocabulary is not looked for
    typed = Typed.parse([*asked.words, "data.tokenizer=bytes"])
    run = load_typed(typed)
    found = trained(run.data, asked.wanted)
    found.write(asked.out)
    for label, share in found.shares.items():
        name = f"{label}: " if label else ""
        yield f"{name}{count_of(share.documents, 'document')}, {amount(share.size)} bytes"
    yield f"{asked.out}: {found.backend.get_vocab_size():,} ids; {END} ends documents"
    if found.bytes_per_token is not None:
        yield f"{found.bytes_per_token:.2f} bytes per token on documents that were left out"
    train = [word for word in asked.words if not word.startswith("data.tokenizer=")]
    overrides = shell_line([*train, f"data.tokenizer={asked.out}"])
    yield f"next: {command_name('train')} {overrides}"


def main(arguments: Sequence[str]) -> int:
    """Train a tokenizer; return the exit code."""
    if {"--help", "-h"} & set(arguments):
        print(with_names(HELP))
        return 0
    with readable_errors("tokenizer", speak=True):
        for line in lines(TokenizerRequest.parse(arguments)):
            print(line)
    return 0


if __name__ == "__main__":
    exit_by(main)
