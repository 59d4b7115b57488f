"""Conversation of `app.cli.chat` at a terminal, or of lines that another program writes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.engine.decoding.conversation import Answer, Speaker
from app.engine.decoding.drawing import Sampling
from app.errors import ConfigError, nearest, say, warn
from app.plan.formatting import count_of

COMMANDS = ("/reset", "/temperature", "/save", "/help", "/quit")
DURING = """\
While it runs:
  /reset                begin anew
  /temperature X        change the temperature
  /save FILE            append the conversation to FILE, as a line of JSON per model
  /help                 show this list
  /quit, Ctrl-D         leave
  Ctrl-C                end the answer; the conversation stays"""
WIDE = 100  # columns of a terminal that has room for two answers side by side


@dataclass(slots=True)
class Stop:
    """Whether the user has asked for the end of an answer."""

    asked: bool = False


@contextmanager
def ended_by_ctrl_c() -> Iterator[Stop]:
    """Take the first Ctrl-C within the block for the end of an answer; a second one interrupts."""
    found = Stop()

    def stop(number: int, frame: FrameType | None) -> None:
        found.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(slots=True)
class Terminal:
    """A conversation of one user with one or several models, each with a history of its own."""

    speakers: Sequence[Speaker]
    system: str | None  # instructions
    count: int  # most new tokens of an answer
    sampling: Sampling
    seed: int
    histories: list[list[dict[str, str]]] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin()

    def talk(self) -> None:
        """Answer line by line until the user leaves."""
        typed = sys.stdin.isatty() and sys.stdout.isatty()
        if typed:
            _tell("/help lists the commands")
        with suppress(ImportError):  # with it `input` edits lines and recalls earlier ones
            import readline  # noqa: F401
        while (line := _line(typed)) is not None:
            if line.startswith("/"):
                if line.split()[0] == "/quit":
                    return
                try:
                    self._command(*line.split(maxsplit=1))
                except ConfigError as error:
                    warn(str(error), "chat")
            elif line.strip():
                self._turn(line)

    def _begin(self) -> None:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.histories = [[*first] for _ in self.speakers]
        self.generators = [
            torch.Generator(speaker.text.decoder.model.device).manual_seed(self.seed)
            for speaker in self.speakers
        ]

    def _command(self, name: str, value: str = "") -> None:
        match name:
            case "/reset":
                self._begin()
                _tell("the conversation begins anew")
            case "/temperature":
                if value:
                    self.sampling = replace(self.sampling, temperature=_number(value))
                _tell(f"temperature {self.sampling.temperature:g}")
            case "/save":
                if not value:
                    raise ConfigError("command", name, "needs a file", nearest="/save chat.jsonl")
                self._save(Path(value.strip()).expanduser())
            case "/help":
                say(DURING, sys.stderr)
            case _:
                rule = f"the commands are {', '.join(COMMANDS)}; a blank in front makes it a text"
                raise ConfigError("command", name, rule, guess=nearest(name, COMMANDS))

    def _save(self, path: Path) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                for speaker, messages in zip(self.speakers, self.histories, strict=True):
                    row = {"model": speaker.name, "messages": messages}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError("save", path, f"cannot be written: {error.strerror}") from error
        _tell(f"appended to {path}: {count_of(len(self.histories[0]), 'message')}")

    def _turn(self, line: str) -> None:
        asked: list[tuple[int, Answer]] = []  # speakers by number
        for nth, speaker in enumerate(self.speakers):
            try:
                prompt = speaker.prompt([*self.histories[nth], _message("user", line)])
            except ConfigError as error:
                warn(f"{error}; /reset begins anew", "chat")
                continue
            answer = speaker.answer(
                prompt, self.count, self.sampling, generator=self.generators[nth]
            )
            asked.append((nth, answer))
        console = Console(highlight=False)
        names = [self.speakers[nth].name for nth, _ in asked]
        if len(asked) > 1 and console.is_terminal and console.width >= WIDE:
            _say_beside(console, names, [answer for _, answer in asked])
        else:
            for (_, answer), name in zip(asked, names, strict=True):
                if len(self.speakers) > 1:
                    print(f"== {name} ==")
                _say(answer)
        for nth, answer in asked:
            said = _message("user", line), _message("assistant", answer.shown)
            self.histories[nth].extend(said)


def _line(typed: bool) -> str | None:
    """Read a line; None at the end of the input."""
    while True:
        try:
            return input("> " if typed else "")
        except EOFError:
            if typed:
                print()  # after the prompt
            return None
        except KeyboardInterrupt:
            say("\n/quit or Ctrl-D leaves", sys.stderr)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError("temperature", value, "must be a number") from None


def _tell(text: str) -> None:
    say(f"chat: {text}", sys.stderr)


def _say(answer: Answer) -> None:
    """Print an answer as it is generated."""
    with ended_by_ctrl_c() as stop:
        for piece in answer.pieces():
            print(piece, end="", flush=True)
            if stop.asked:
                break
    print(flush=True)
    if not (stop.asked or answer.said.ended):
        _tell(_ended(answer))


def _ended(answer: Answer) -> str:
    return f"ended after {count_of(len(answer.said.tokens), 'token')}"


def _say_beside(console: Console, names: Sequence[str], answers: Sequence[Answer]) -> None:
    """Print answers in columns as they are generated, a token of each in turn."""
    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 2))
    for name in names:
        table.add_column(Text(name), ratio=1)
    texts = [Text(overflow="fold") for _ in names]
    table.add_row(*texts)
    going = [(text, answer.pieces()) for text, answer in zip(texts, answers, strict=True)]
    with ended_by_ctrl_c() as stop, Live(table, console=console):
        while going and not stop.asked:
            for text, pieces in [*going]:
                if (piece := next(pieces, None)) is None:
                    going.remove((text, pieces))
                else:
                    text.append(piece)
    for name, answer in zip(names, answers, strict=True):
        if not (stop.asked or answer.said.ended):
            _tell(f"{name} {_ended(answer)}")
