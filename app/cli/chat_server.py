"""HTTP server of `app.cli.chat` on this host: the interface of OpenAI's chat completions, and a
page.

Threads of the server read requests and write answers; the main thread, which owns the models,
generates one answer at a time.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn
from urllib.parse import unquote

import torch

from app.cli.chat_page import PAGE, TEMPERATURE
from app.cli.generate import apart
from app.engine.decoding.conversation import CONVERSATION, Speaker
from app.engine.decoding.drawing import Sampling
from app.errors import ConfigError, nearest, say

HOST = "127.0.0.1"
OWN_NAMES = (HOST, "localhost")  # a page elsewhere that has its name lead here sends another
MOST_BYTES = 1 << 24  # of a request
COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/models"
FIELDS = (
    "messages",
    "model",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "stop",
    "n",
    "user",  # names the user to a provider
    "response_format",
)
TEXT = {"type": "text"}  # the format of answers
ROLES = ("system", "developer", "user", "assistant", "tool")
# Of errors that OpenAI's clients tell apart, by what they are about: status, field, code.
CODES = {
    "model": (HTTPStatus.NOT_FOUND, "model", "model_not_found"),
    CONVERSATION: (HTTPStatus.BAD_REQUEST, "messages", "context_length_exceeded"),
}
UNSET: tuple[Any, ...] = (None, 0, False, "", [], {})  # values of other fields that ask for nothing


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request that does not say it gets."""

    system: str | None  # instructions
    count: int  # most new tokens
    sampling: Sampling
    generator: torch.Generator


@dataclass(slots=True)
class AnswerJob:
    """An answer that a client waits for."""

    speaker: Speaker
    prompt: list[int]
    count: int
    sampling: Sampling
    generator: torch.Generator
    stop: tuple[str, ...]
    ends: frozenset[int]  # tokens that end it
    streams: bool  # piece by piece
    tells_usage: bool  # at the end of a stream
    pieces: SimpleQueue[str | None] = field(default_factory=SimpleQueue)  # None: it is complete
    left: bool = False  # the client has gone
    finish: str = "stop"  # why it ended
    tokens: int = 0  # generated
    label: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def run(self) -> None:
        """Generate the answer."""
        try:
            answer = self.speaker.answer(
                self.prompt,
                self.count,
                self.sampling,
                generator=self.generator,
                stop=self.stop,
                ends=self.ends,
            )
            for piece in answer.pieces():
                self.pieces.put(piece)
                if self.left:
                    break
            self.finish = "stop" if answer.said.ended else "length"
            self.tokens = len(answer.said.tokens)
        finally:
            self.pieces.put(None)

    def texts(self) -> Iterator[str]:
        """Yield the pieces of the answer that are not empty, as they come."""
        while (piece := self.pieces.get()) is not None:
            if piece:
                yield piece

    def reply(self, kind: str, **choice: object) -> dict[str, Any]:
        """Return a reply with one choice."""
        return {
            "id": self.label,
            "object": kind,
            "created": self.created,
            "model": self.speaker.name,
            "choices": [{"index": 0, "finish_reason": None, **choice}],
        }

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of prompt and answer."""
        count = len(self.prompt)
        return {
            "prompt_tokens": count,
            "completion_tokens": self.tokens,
            "total_tokens": count + self.tokens,
        }


def job_of(body: Mapping[str, Any], speakers: Sequence[Speaker], defaults: Defaults) -> AnswerJob:
    """Return what a request asks for. Raises ConfigError about one of its fields."""
    _check_fields(body)
    names = {speaker.name: speaker for speaker in speakers}
    name = body.get("model") or speakers[0].name
    if name not in names:
        near = nearest(str(name), [*names])
        raise ConfigError("model", name, f"the models are {', '.join(names)}", guess=near)
    speaker = names[name]
    usual = defaults.sampling
    sampling = Sampling(
        _number(body, "temperature", usual.temperature),
        usual.top_k,
        _number(body, "top_p", 1.0) if body.get("top_p") is not None else usual.top_p,
    )
    count = _number(body, "max_tokens", defaults.count, whole=True)
    generator = defaults.generator
    if body.get("seed") is not None:
        seed = int(_number(body, "seed", 1, whole=True))
        generator = torch.Generator(generator.device).manual_seed(seed % (1 << 63))
    stop, ends = apart(_stops(body), speaker.tokenizer)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ConfigError("stream_options", json.dumps(options), "must be a JSON object")
    messages = [_message(each) for each in _messages(body)]
    if defaults.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": defaults.system}, *messages]
    return AnswerJob(
        speaker,
        speaker.prompt(messages),
        count=int(_number(body, "max_completion_tokens", count, whole=True)),
        sampling=sampling,
        generator=generator,
        stop=tuple(stop),
        ends=ends,
        streams=bool(body.get("stream")),
        tells_usage=bool(options.get("include_usage")),
    )


def _check_fields(body: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field that asks for what there is not."""
    for name, value in body.items():
        if name not in FIELDS and value not in UNSET:
            rule = f"is not supported; fields are {', '.join(FIELDS)}"
            raise ConfigError(name, json.dumps(value), rule, guess=nearest(name, FIELDS))
    if _number(body, "n", 1, whole=True) != 1:
        raise ConfigError("n", body["n"], "must be 1", nearest=1)
    if body.get("response_format") not in (None, TEXT):
        value = json.dumps(body["response_format"])
        raise ConfigError("response_format", value, f"must be {json.dumps(TEXT)}")


def _stops(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ConfigError("stop", json.dumps(stop), "must be a text or a list of texts")
    return stop


def _number(body: Mapping[str, Any], name: str, default: float, whole: bool = False) -> float:
    value = body.get(name)
    if value is None:
        return default
    kinds = (int,) if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ConfigError(name, json.dumps(value), f"must be a {'whole ' * whole}number")
    if whole and name != "seed" and value < 1:
        raise ConfigError(name, value, "must be at least 1", nearest=1)
    return float(value) if not whole else value


def _messages(body: Mapping[str, Any]) -> list[Any]:
    found = body.get("messages")
    if not isinstance(found, list) or not found:
        raise ConfigError("messages", json.dumps(found), "must be a list of messages")
    return found


def _message(given: Any) -> dict[str, Any]:
    """Return a message whose content is one text."""
    match given:
        case {"role": str(role)} if role not in ROLES:
            rule = f"has a role that is none of {', '.join(ROLES)}"
            raise ConfigError("messages", json.dumps(given), rule, guess=nearest(role, ROLES))
        case {"role": str(), "content": str()}:
            return dict(given)
        case {"role": str(), "content": [*parts]}:
            texts = [part["text"] for part in parts if _is_text(part)]
            if len(texts) == len(parts):
                return {**given, "content": "".join(texts)}
    raise ConfigError("messages", json.dumps(given), "needs a role and a content of text")


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Send the page, or the list of models."""
        if not self._is_own():
            return
        if self.path == "/":
            usual = f"{self.server.defaults.sampling.temperature:g}"
            page = PAGE.replace(TEMPERATURE, usual).encode()
            self._send(HTTPStatus.OK, page, "text/html; charset=utf-8")
            return
        models = {
            speaker.name: {
                "id": speaker.name, "object": "model", "created": 0, "owned_by": "graphfold"
            }
            for speaker in self.server.speakers
        }  # fmt: skip
        name = unquote(self.path[len(MODELS) + 1 :]) if self.path.startswith(f"{MODELS}/") else ""
        if self.path == MODELS:
            self._send_json(HTTPStatus.OK, {"object": "list", "data": [*models.values()]})
        elif name in models:
            self._send_json(HTTPStatus.OK, models[name])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"{self.path}: there are {MODELS} and {COMPLETIONS}")

    def do_POST(self) -> None:
        """Answer a conversation."""
        if not self._is_own():
            return
        if self.path != COMPLETIONS:
            self._refuse(HTTPStatus.NOT_FOUND, f"{self.path}: there is {COMPLETIONS}")
            return
        try:
            body = self._body()
            job = job_of(body, self.server.speakers, self.server.defaults)
        except ConfigError as error:
            status, param, code = CODES.get(error.key, (HTTPStatus.BAD_REQUEST, error.key, None))
            self._refuse(status, str(error), param=param, code=code)
            return
        self.server.jobs.put(job)
        try:
            (self._stream if job.streams else self._whole)(job)
        except OSError:  # the client has gone
            job.left = True

    def _body(self) -> Mapping[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            raise ConfigError("Content-Length", length, f"must be at most {MOST_BYTES}")
        try:
            found = json.loads(self.rfile.read(int(length)))
        except ValueError as error:
            raise ConfigError("body", "", f"is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError("body", "", "must be a JSON object")
        return found

    def _whole(self, job: AnswerJob) -> None:
        message = {"role": "assistant", "content": "".join(job.texts())}
        found = job.reply("chat.completion", message=message, finish_reason=job.finish)
        self._send_json(HTTPStatus.OK, {**found, "usage": job.usage})

    def _stream(self, job: AnswerJob) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        kind = "chat.completion.chunk"
        self._event(job.reply(kind, delta={"role": "assistant", "content": ""}))
        for piece in job.texts():
            self._event(job.reply(kind, delta={"content": piece}))
        self._event(job.reply(kind, delta={}, finish_reason=job.finish))
        if job.tells_usage:
            self._event({**job.reply(kind), "choices": [], "usage": job.usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: object) -> None:
        self.wfile.write(b"data: %s\n\n" % json.dumps(value).encode())

    def _is_own(self) -> bool:
        """Refuse a request for another host: a page could read answers through a name of its own
        that leads to this host.
        """
        own = self.headers.get("Host", HOST).partition(":")[0] in OWN_NAMES
        if not own:
            self._refuse(HTTPStatus.FORBIDDEN, f"this server is {' or '.join(OWN_NAMES)}")
        return own

    def _refuse(
        self,
        status: HTTPStatus,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
    ) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        self._send_json(status, {"error": error})

    def _send_json(self, status: HTTPStatus, value: object) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    """Server of models at a port of this host; 0 takes a free one. Raises ConfigError."""

    daemon_threads = True
    jobs: SimpleQueue[AnswerJob]

    def __init__(self, port: int, speakers: Sequence[Speaker], defaults: Defaults) -> None:
        self.speakers = speakers
        self.defaults = defaults
        self.jobs = SimpleQueue()
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            rule = f"cannot listen there: {error.strerror}"
            raise ConfigError("serve", port, rule, advice="choose a free port") from error

    def answer_all(self) -> NoReturn:
        """Answer requests in this thread, until it is interrupted."""
        Thread(target=self.serve_forever, daemon=True).start()
        say(f"http://{HOST}:{self.server_port} (API: {COMPLETIONS}); Ctrl-C ends", sys.stderr)
        try:
            while True:
                self.jobs.get().run()
        finally:
            self.shutdown()
            self.server_close()
