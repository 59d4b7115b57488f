"""The page of `python -m app.cli.chat … serve=PORT`, in a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.cli.chat_server import Defaults, Server
from app.engine.decoding.conversation import CONVERSATION
from app.engine.decoding.drawing import Sampling
from app.errors import ConfigError
from tests.browser import CHROMIUM, WAIT_S, WITHOUT, Page, opened

pytestmark = [pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)]


@dataclass
class Slow:
    """A speaker that says what it is handed."""

    name: str
    tokenizer = SimpleNamespace(special={})
    handed: Queue[str | None] = field(default_factory=Queue)  # None ends an answer
    asked: list[Any] = field(default_factory=list)  # messages and temperature of each
    ended: int = 0  # answers

    def prompt(self, said: list[dict[str, str]]) -> list[int]:
        if said[-1]["content"] == "too long":
            raise ConfigError(CONVERSATION, "too long…", "has 9 tokens, and the context holds 8")
        self.asked.append([said])
        return [1]

    def answer(self, _: object, count: int, sampling: Sampling, **__: object) -> Any:
        self.asked[-1].append(sampling.temperature)

        def pieces() -> Iterator[str]:
            try:
                while (piece := self.handed.get(timeout=WAIT_S)) is not None:
                    yield piece
            finally:
                self.ended += 1

        return SimpleNamespace(pieces=pieces, said=SimpleNamespace(ended=True, tokens=[1]))


@dataclass
class Talk:
    page: Page
    speakers: list[Slow]

    def say(self, text: str) -> None:
        self.page.click("#text")
        self.page.write(text)
        self.page.enter()

    def hand(self, *pieces: str | None) -> None:
        """Both speakers answer, one after the other."""
        for speaker in self.speakers:
            for piece in pieces:
                speaker.handed.put(piece)

    def shown(self, kind: str) -> list[str]:
        script = f"[...document.querySelectorAll('.{kind}')].map(each => each.textContent)"
        found: list[str] = self.page.value(script)
        return found

    def until_shown(self, kind: str, *texts: str) -> None:
        script = f"[...document.querySelectorAll('.{kind}')].map(each => each.textContent).join()"
        self.page.until(f"{script} === {json.dumps(','.join(texts))}")

    def until_rest(self) -> None:
        self.page.until("document.querySelector('#stop').hidden")


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    speakers: list[Any] = [Slow("runs/code"), Slow("runs/tuned")]
    defaults = Defaults(None, 9, Sampling(0.5), generator=torch.Generator())
    with Server(0, speakers, defaults) as server:
        Thread(target=server.serve_forever, daemon=True).start()

        def work() -> None:
            while True:
                server.jobs.get().run()

        Thread(target=work, daemon=True).start()
        with opened(f"http://127.0.0.1:{server.server_port}/", tmp_path) as page:
            page.until("talks.length === 2")
            yield Talk(page, speakers)
        server.shutdown()


def test_message_gets_streamed_answers_and_a_second_one(talk: Talk):
    first, second = talk.speakers
    assert talk.page.value("document.querySelector('#models').textContent") == (
        "runs/code · runs/tuned"
    )
    talk.page.click("#text")
    talk.page.write("def f():")
    talk.page.enter(shift=True)
    talk.page.write("  <b>1</b>")
    talk.page.enter()
    talk.until_shown("user", "def f():\n  <b>1</b>")
    first.handed.put("né ")
    talk.until_shown("answer", "né ")  # while it is generated
    assert talk.page.value("document.querySelector('#send').hidden")
    talk.page.enter()  # nothing: it is not done
    first.handed.put(" 1")
    first.handed.put(None)
    second.handed.put("two")
    second.handed.put(None)
    talk.until_rest()
    assert talk.shown("answer") == ["né  1", "two"] and talk.shown("error") == []
    talk.page.value("document.querySelector('#temperature').value = ''")
    talk.page.click("#temperature")
    talk.page.write("1.25")
    talk.say("again")
    talk.hand("b", None)
    talk.until_rest()
    (begun, usual), (continued, typed) = first.asked
    assert (usual, typed) == (0.5, 1.25)
    assert [*begun, {"role": "assistant", "content": "né  1"}] == continued[:2]
    assert continued[2:] == [{"role": "user", "content": "again"}]


def test_stop_keeps_what_was_said(talk: Talk):
    talk.say("a")
    talk.hand("half")
    talk.until_shown("answer", "half")
    talk.page.click("#stop")
    talk.until_rest()
    assert talk.shown("note") == ["stopped", "stopped"]
    first = talk.speakers[0]
    deadline = time.monotonic() + WAIT_S
    while not first.ended:  # the server hears that the page has left when it writes
        assert time.monotonic() < deadline
        first.handed.put("unheard")
        time.sleep(0.01)
    first.handed.queue.clear()
    talk.say("b")
    talk.hand("c", None)
    talk.until_rest()
    for speaker, said in zip(talk.speakers, ("half", ""), strict=True):
        assert [each["content"] for each in speaker.asked[-1][0]] == ["a", said, "b"]


def test_error_is_shown_and_reset_begins_anew(talk: Talk, tmp_path: Path):
    talk.say("a")
    talk.hand("ä", None)
    talk.until_rest()
    talk.say("too long")
    talk.until_rest()
    error = "conversation=too long…: has 9 tokens, and the context holds 8; Reset begins anew"
    assert talk.shown("error") == [error, error]
    talk.page.click("#save")
    file = tmp_path / "conversation.jsonl"
    deadline = time.monotonic() + WAIT_S
    while not file.is_file() or file.read_text().count("\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ä"}]
    names = ("runs/code", "runs/tuned")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [{"model": name, "messages": said} for name in names]
    talk.page.click("#reset")
    talk.page.until("!document.querySelector('.user')")
    talk.say("b")
    talk.hand("c", None)
    talk.until_rest()
    assert [each["content"] for each in talk.speakers[0].asked[-1][0]] == ["b"]


def test_answers_stand_side_by_side_where_there_is_room(talk: Talk):
    talk.say("long" * 300)
    talk.hand("word " * 300 + "x" * 300, None)
    talk.until_rest()
    tops = "[...document.querySelectorAll('.answer')].map(each => each.getBoundingClientRect().top)"
    for width, columns in ((1000, 2), (360, 1)):
        talk.page.resize(width, 640)
        assert len(set(talk.page.value(tops))) == 3 - columns
        assert talk.page.value("document.documentElement.scrollWidth") <= width
        sent = talk.page.value("document.querySelector('#send').getBoundingClientRect().bottom")
        assert sent <= 640
