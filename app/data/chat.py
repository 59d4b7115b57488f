"""Conversations of files, as the texts that a chat template makes of them, with marks around what
is trained: what the assistant says, up to the end of its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from app.config import DataConfig
from app.data.chat_template import BEGIN, END, ChatTemplate
from app.data.faults import Fault, Reading, file_format, in_one_line
from app.data.json_lines import json_rows, parsed
from app.data.marks import marked
from app.data.messages import WEIGHT, Form, form_of, messages_of
from app.data.tokenizer import BYTES, JsonTokenizer, Tokenizer
from app.data.tokenizer_files import tokenizer_file
from app.errors import ConfigError

KEY = "data.chat_template"
CHATML = "chatml"
CHATML_SOURCE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Of data.tokenizer=bytes: turns between two control characters, of one byte each.
OF_BYTES = "bytes"
OF_BYTES_SOURCE = CHATML_SOURCE.replace("<|im_start|>", r"\x02").replace(
    "{{ message.content }}<|im_end|>", r"{{ message.content + '\x03' }}"
)
AROUND = 30  # characters that a message shows on both sides of a place
ROWS = 256  # of parquet, read at once


def chat_template(config: DataConfig) -> ChatTemplate:
    """Return the template of data.chat_template, else the tokenizer's; bytes have one that is
    built in. Raises ConfigError.
    """
    chosen = config.chat_template
    folder = None if config.tokenizer == BYTES else tokenizer_file(config.tokenizer).parent
    try:
        if chosen == CHATML:
            return ChatTemplate.of_text(CHATML_SOURCE, Path(CHATML), folder)
        if chosen is not None:
            return ChatTemplate.of_file(Path(chosen).expanduser(), folder)
        if folder is None:
            return ChatTemplate.of_text(OF_BYTES_SOURCE, Path(OF_BYTES), None)
        found = ChatTemplate.find(folder)
    except ConfigError as error:
        raise ConfigError(KEY, error.value, error.rule, guess=error.guess) from error
    if found is None:
        rule = "the tokenizer has no chat template"
        raise ConfigError(KEY, chosen, rule, nearest=CHATML, advice="a file is taken too")
    return found


@dataclass(slots=True)
class Conversations:
    """Writes rows of a source as texts, all in the form of the first one."""

    template: ChatTemplate
    form: Form | None = None

    def text(self, row: Any) -> str:
        """Return the text of a row, with BEGIN and END around what is trained. Raises Fault."""
        if isinstance(row, str):
            row = parsed(row)
        self.form = self.form or form_of(row)
        messages, tools = messages_of(row, self.form)
        try:
            found = _text(self.template, messages, tools)
        except ConfigError as error:  # of the template
            name = Path(str(error.value)).name
            raise Fault(f"is not written: {name} {error.rule}") from error
        try:
            found.encode()
        except UnicodeEncodeError:
            raise Fault("holds half of a character") from None
        return found


def conversations(path: str, config: DataConfig, reading: Reading) -> Iterator[bytes]:
    """Yield the text of every conversation of a file, with BEGIN and END around what is trained.

    Raises Fault, with the row, and OSError.
    """
    writer = Conversations(chat_template(config))
    for place, row in _rows(path, reading):
        try:
            text = writer.text(row)
        except Fault as fault:
            reading.bad_row(path, Fault(f"{place} {fault.rule}", fault.advice))
        else:
            yield text.encode()


def _rows(path: str, reading: Reading) -> Iterator[tuple[str, Any]]:
    """Yield every row with its place; rows of JSON as texts."""
    with open(path, "rb") as file:
        kind = file_format(file.read(8))
    if kind != "parquet":
        yield from json_rows(path, reading)
        return
    for number, row in enumerate(_parquet_rows(path), start=1):
        yield f"row {number}", row


def _parquet_rows(path: str) -> Iterator[Any]:
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(ROWS, use_threads=False):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise Fault(f"is not a whole parquet file: {in_one_line(str(error))}") from error


def _text(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None
) -> str:
    found = (
        template.marked(messages, tools=tools)
        if template.marks
        else _by_prefixes(template, messages, tools)
    )
    turn = found.rpartition(BEGIN)[2].partition(END)[0].rstrip()
    if BEGIN not in found or not turn:
        raise Fault("has no trained token: the template marks nothing in it")
    _check_calls(template, messages)
    last = [each for each in messages if each["role"] == "assistant"][-1]
    said = (last.get("content") or "").strip()
    if said and turn.endswith(said):
        rule = "would not teach where a turn ends: what is trained of its last turn ends with "
        advice = "write the end of the turn in the template, inside its generation marks if any"
        raise Fault(f"{rule}{said[-AROUND:]!r}", advice)
    weights = [each.get(WEIGHT, 1) for each in messages if each["role"] == "assistant"]
    return found if all(weights) else _without(found, weights)


def _check_calls(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise Fault for a call of a tool that the template does not write."""
    answers = [each for each in messages if each["role"] == "assistant"]
    calls = [call for each in answers for call in each.get("tool_calls") or ()]
    if not calls:
        return
    text = template.text(messages, answers=False)  # without the tools, which have these names
    for name in ((call.get("function") or call)["name"] for call in calls):
        if name not in text:
            rule = f"calls the tool {name!r}, which the template leaves out"
            raise Fault(rule, "choose a template with tool_calls")


def _without(found: str, weights: Sequence[int]) -> str:
    """Return a text without the marks of answers that have no weight. Raises Fault."""
    head, *answers = found.split(BEGIN)
    if len(answers) != len(weights):
        rule = f"gives weights to {len(weights)} answers, and the template marks {len(answers)}"
        raise Fault(rule)
    if not any(weights):
        raise Fault("has no trained token: no answer has a weight")
    pairs = zip(answers, weights, strict=True)
    return head + "".join(
        BEGIN + text if weight else text.replace(END, "") for text, weight in pairs
    )


def _by_prefixes(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None
) -> str:
    """Mark what each turn of the assistant adds to the text of the messages before it, up to white
    space at its end. Raises Fault where the text of these is not how the whole text begins.
    """
    whole = template.text(messages, answers=False, tools=tools)
    parts, done = list[str](), 0
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _before(template, messages[:number], tools)
            after = template.text(messages[: number + 1], answers=False, tools=tools)
            _check_prefix(whole, before, number)
            _check_prefix(whole, after, number + 1)
            end = len(after.rstrip())
            parts += [whole[done : len(before)], BEGIN, whole[len(before) : end], END]
            done = max(end, len(before))
    return "".join([*parts, whole[done:]])


def _before(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None
) -> str:
    """Return the text up to where an answer to these messages begins. Raises Fault."""
    try:
        return template.text(messages, answers=True, tools=tools)
    except ConfigError as error:
        if messages:
            raise
        rule = "begins with the assistant, and the template cannot tell where its answer begins: "
        advice = "leave out the turn, or write {% generation %} … {% endgeneration %} in the "
        raise Fault(rule + error.rule, f"{advice}template") from error


def _check_prefix(whole: str, text: str, count: int) -> None:
    if whole.startswith(text):
        return
    pairs = enumerate(zip(whole, text, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), len(whole))
    first = max(at - AROUND, 0)
    rule = (
        f"has a text that does not begin with that of its messages up to {count}, so what the "
        f"assistant says cannot be told: {whole[first : at + AROUND]!r} instead of "
        f"{text[first : at + AROUND]!r}"
    )
    raise Fault(rule, "mark it with {% generation %} … {% endgeneration %} in the template")


@dataclass(frozen=True, slots=True)
class _Unmarked:
    """A text without its marks, and the trained stretches of its characters."""

    text: str
    borders: tuple[int, ...]  # begin, end, begin, …

    @classmethod
    def of(cls, document: bytes) -> _Unmarked:
        text = document.decode().replace(END, BEGIN)
        pieces = text.split(BEGIN)
        borders = np.cumsum([len(piece) for piece in pieces])[:-1].tolist()
        return cls("".join(pieces), tuple(borders))

    def before(self) -> np.ndarray:
        """Return how many trained characters are before each place, [C + 1]."""
        counts = np.zeros(len(self.text) + 1, np.int64)
        for begin, end in list(pairwise(self.borders))[::2]:
            counts[begin + 1 : end + 1] = 1
        return np.cumsum(counts)


def marked_documents(tokenizer: Tokenizer, documents: Sequence[bytes]) -> list[np.ndarray]:
    """Return the tokens of marked texts, as `app.data.marks` writes them; a token is trained if
    any of its characters is.
    """
    texts = [_Unmarked.of(document) for document in documents]
    found = []
    if isinstance(tokenizer, JsonTokenizer):
        all_texts = [each.text for each in texts]
        encodings = tokenizer.backend.encode_batch(all_texts, add_special_tokens=False)
        for each, encoding in zip(texts, encodings, strict=True):
            before = each.before()
            spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            trained_T = before[spans[:, 1]] > before[spans[:, 0]]
            found.append(marked(np.array(encoding.ids), trained_T))
        return found
    for each in texts:
        widths = [len(letter.encode()) for letter in each.text]
        trained_T = np.repeat(np.diff(each.before()) > 0, widths)
        found.append(marked(np.asarray(tokenizer.encode(each.text)), trained_T))
    return found
