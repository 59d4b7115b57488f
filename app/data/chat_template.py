"""Chat templates: the text of a conversation, as `apply_chat_template` of `transformers` writes it.

A model's template is in chat_template.jinja beside its tokenizer, else in `chat_template` of
tokenizer_config.json: a text, or a list of named ones. It comes with a model, so it runs in the
sandbox of jinja2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.data.special_tokens import SETTINGS, named_token, read_settings
from app.data.tokenizer_files import TEMPLATE
from app.errors import ConfigError, nearest

KEY = "template"  # option of the programs that take a template
DEFAULT = "default"  # of several templates
TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Around what the assistant says: characters that Unicode keeps out of texts.
BEGIN, END = "\ufdd0", "\ufdd1"
UNMARKED = {ord(BEGIN): None, ord(END): None}
MARKS = re.compile(r"\{%[-+]?\s*generation\b")
SAMPLE = "sample-answer-of-the-assistant"  # occurs in no template

Message = Mapping[str, Any]  # "role" and "content", and what else the template reads


class Generation(Extension):
    """Tag `generation`, which marks what the assistant says: its text, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the statements up to `endgeneration`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body, lineno=line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Template of a model."""

    path: Path  # file that it was read from
    compiled: jinja2.Template
    tokens: Mapping[str, str]  # what templates call `bos_token` and the like
    source: str

    @classmethod
    def find(cls, folder: Path) -> ChatTemplate | None:
        """Return the template of the model in a folder; None if it has none. Raises ConfigError."""
        if (folder / TEMPLATE).is_file():
            return cls.of_file(folder / TEMPLATE, folder)
        match read_settings(folder / SETTINGS).get("chat_template"):
            case None:
                return None
            case str(source):
                return cls.of_text(source, folder / SETTINGS, folder)
            case [*several]:
                for each in several:
                    match each:
                        case {"name": "default", "template": str(source)}:
                            return cls.of_text(source, folder / SETTINGS, folder)
        rule = f"chat_template is no text and no list with one named {DEFAULT}"
        raise ConfigError(KEY, folder / SETTINGS, rule, advice=f"give {KEY}=FILE")

    @classmethod
    def of_file(cls, path: Path, folder: Path | None) -> ChatTemplate:
        """Return the template of a file, with the token names of the model in `folder`; None: there
        are none. Raises ConfigError.
        """
        try:
            return cls.of_text(path.read_text(encoding="utf-8"), path, folder)
        except OSError as error:
            found = sorted(file.name for file in path.parent.glob("*.jinja"))
            rule = f"cannot be read: {error.strerror}"
            raise ConfigError(KEY, path, rule, guess=nearest(path.name, found)) from error
        except UnicodeDecodeError as error:
            raise ConfigError(KEY, path, f"is no UTF-8: {error.reason}") from error

    @classmethod
    def of_text(cls, source: str, path: Path, folder: Path | None) -> ChatTemplate:
        """Return a template of `path`; otherwise as above."""
        named = {name: named_token(folder, name) for name in TOKENS} if folder else {}
        try:
            compiled = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(KEY, path, f"line {error.lineno}: {error.message}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(KEY, path, f"is no template: {error}") from error
        tokens = {name: token for name, token in named.items() if token}
        return cls(path, compiled, tokens, source=source)

    @property
    def marks(self) -> bool:
        """Whether the template marks what the assistant says."""
        return MARKS.search(self.source) is not None

    def text(
        self, messages: Sequence[Message], answers: bool = True, tools: Sequence[Any] | None = None
    ) -> str:
        """Return the text of a conversation, with `answers` up to where the assistant begins.

        Raises ConfigError if the template refuses it.
        """
        return self.marked(messages, answers, tools).translate(UNMARKED)

    def marked(
        self, messages: Sequence[Message], answers: bool = False, tools: Sequence[Any] | None = None
    ) -> str:
        """Return the text as above, with BEGIN and END around what the template marks."""
        try:
            return self.compiled.render(
                messages=[*messages], add_generation_prompt=answers, tools=tools,
                documents=None,
                **self.tokens,
            )  # fmt: skip
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            rule = f"refuses the conversation: {error}"
            raise ConfigError(KEY, self.path, rule) from error

    def after_answer(self) -> str:
        """Return the text that follows an answer, without blanks behind it; "" if none does."""
        question = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": SAMPLE}
        try:
            _, found, after = self.text([question, answer], answers=False).rpartition(SAMPLE)
        except ConfigError:  # it takes no such conversation: it has to refuse a real one
            return ""
        return after.rstrip() if found else ""

    def end_of_turn(self, special: Collection[str]) -> str | None:
        """Return the one of the `special` tokens that follows an answer; None if none does."""
        after = self.after_answer().lstrip()
        return max((token for token in special if after.startswith(token)), key=len, default=None)


def _environment() -> jinja2.Environment:
    """Return what templates are written for: names and options of `transformers`."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    found.filters["tojson"] = _to_json  # jinja2's own escapes HTML
    found.globals["raise_exception"] = _refuse
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
