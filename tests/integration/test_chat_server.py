"""`python -m app.cli.chat … serve=PORT`: chat completions as OpenAI's clients ask for them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.cli.chat_server import Defaults, Server, job_of
from app.engine.decoding.drawing import Sampling
from app.errors import ConfigError
from tests.integration.chat import TURNS
from tests.integration.test_model_ends import save_chain
from tests.programs import TIMEOUT_S, Forked

QUICK = [{"role": "user", "content": "the quick"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "the quick"}]}]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("server")
    save_chain(folder / "model", tokenizer_config={"eos_token": "</s>", "chat_template": TURNS})
    line = [sys.executable, "-m", "app.cli.chat", "model", "serve=0", "temperature=0"]
    with (folder / "err").open("w+b") as err:
        program = Forked(line, cwd=folder, stdout=err, stderr=err)
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+) ", (folder / "err").read_text())):
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield int(found[1])
        program.send_signal(signal.SIGINT)
        assert program.wait(TIMEOUT_S) == 130
        assert (folder / "err").read_text().endswith("\nchat: stopped\n")


def asked(port: int, body: object, path: str = "/v1/chat/completions") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def got(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    return reply.status, reply.headers["Content-Type"], reply.read().decode()


@pytest.mark.parametrize("messages", [QUICK, PARTS], ids=["text", "parts"])
def test_answer_is_a_completion(port: int, messages: object):
    status, text = asked(port, {"messages": messages, "frequency_penalty": 0, "tools": None})
    found = json.loads(text)
    assert status == 200 and found["object"] == "chat.completion" and found["model"] == "model"
    answer = {"role": "assistant", "content": " brown fox"}
    assert found["choices"] == [{"index": 0, "message": answer, "finish_reason": "stop"}]
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    limits = {"max_completion_tokens": 1, "seed": 7, "temperature": 0.0}
    (cut,) = json.loads(asked(port, {"messages": messages, **limits})[1])["choices"]
    assert cut["message"]["content"] == " brown" and cut["finish_reason"] == "length"
    (stopped,) = json.loads(asked(port, {"messages": messages, "stop": " fox"})[1])["choices"]
    assert stopped["message"]["content"] == " brown" and stopped["finish_reason"] == "stop"


def test_stream_has_the_pieces_of_an_answer(port: int):
    body = {"messages": QUICK, "stream": True, "stream_options": {"include_usage": True}}
    status, text = asked(port, body)
    *events, done, rest = text.split("\n\n")
    assert (status, done, rest) == (200, "data: [DONE]", "")
    first, *pieces, last, usage = (json.loads(each.removeprefix("data: ")) for each in events)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [each["choices"][0]["delta"]["content"] for each in pieces] == [" brown", " fox"]
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 4
    assert len({each["id"] for each in (first, *pieces, last, usage)}) == 1


def test_models_page_and_unknown_places(port: int):
    status, kind, text = got(port, "/v1/models")
    assert (status, kind) == (200, "application/json")
    assert [each["id"] for each in json.loads(text)["data"]] == ["model"]
    status, kind, text = got(port, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8") and "/v1/chat/completions" in text
    assert json.loads(got(port, "/v1/models/model")[2])["id"] == "model"
    assert got(port, "/v1")[0] == 404 and got(port, "/v1/models/other")[0] == 404
    assert asked(port, {}, "/v1/completions")[0] == 404
    assert got(port, "/", Host=f"localhost:{port}")[0] == 200
    status, _, text = got(port, "/v1/models", Host="example.com")
    assert status == 403 and "127.0.0.1 or localhost" in text


LONG = [{"role": "user", "content": "the" * 99}]


@pytest.mark.parametrize(
    ("body", "rule", "about"),
    [
        ([], "body=: must be a JSON object", (400, "body", None)),
        ({"messages": []}, "messages=[]: must be a list of messages", (400, "messages", None)),
        (
            {"messages": QUICK, "model": "modl"},
            "did you mean model?",
            (404, "model", "model_not_found"),
        ),
        (
            {"messages": LONG},
            "and the context holds 64",
            (400, "messages", "context_length_exceeded"),
        ),
    ],
    ids=["list", "no messages", "other model", "long"],
)
def test_mistakes_of_a_request_are_said(
    port: int, body: object, rule: str, about: tuple[int, str, str | None]
):
    status, text = asked(port, body)
    error = json.loads(text)["error"]
    assert (status, error["param"], error["code"]) == about and rule in error["message"]
    assert error["type"] == "invalid_request_error"


def speaker_of(name: str) -> Any:
    return SimpleNamespace(
        name=name,
        prompt=lambda said: [each["content"] for each in said],
        tokenizer=SimpleNamespace(special={"</s>": 2}),
    )


DEFAULTS = Defaults("short", 9, Sampling(0.5, 3, 0.8), generator=torch.Generator())


def test_requests_change_what_is_usual():
    speakers = [speaker_of("one"), speaker_of("two")]
    usual = job_of({"messages": QUICK}, speakers, DEFAULTS)
    assert usual.prompt == ["short", "the quick"] and usual.speaker is speakers[0]
    assert (usual.count, usual.sampling, usual.generator) == (
        9, DEFAULTS.sampling, DEFAULTS.generator,
    )  # fmt: skip
    own = [{"role": "system", "content": "long"}, *PARTS]
    body = {"messages": own, "model": "two", "temperature": 1, "top_p": 0.5, "max_tokens": 4}
    body |= {"seed": -5, "stop": ["a", "</s>", "b"], "response_format": {"type": "text"}}
    job = job_of({**body, "user": "me"}, speakers, DEFAULTS)
    assert job.prompt == ["long", "the quick"] and job.speaker is speakers[1]
    assert (job.count, job.sampling, job.stop) == (4, Sampling(1.0, 3, 0.5), ("a", "b"))
    assert job.generator.initial_seed() == 2**63 - 5 and job.ends == {2}


@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ({"n": 2}, "n=2: must be 1"),
        ({"temperature": "hot"}, 'temperature="hot": must be a number'),
        ({"temperature": -1}, "temperature=-1.0: must be at least 0"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"seed": 1.5}, "seed=1.5: must be a whole number"),
        ({"stop": [1]}, "stop=[1]: must be a text or a list of texts"),
        ({"stream_options": 1}, "stream_options=1: must be a JSON object"),
        ({"tools": [{"type": "function"}]}, "tools=.*: is not supported; fields are messages, "),
        ({"response_format": {"type": "json_object"}}, 'must be {"type": "text"}'),
        ({"stop": "a</s>"}, "stop=a</s>: mixes the special token"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "did you mean user?"),
        ({"temperture": 1}, "did you mean temperature?"),
        ({"messages": [{"role": "user", "content": None}]}, "needs a role and a content of text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content of text"),
    ],
)
def test_fields_that_cannot_be_used_are_refused(field: dict[str, object], rule: str):
    with pytest.raises(ConfigError) as error:
        job_of({"messages": QUICK, **field}, [speaker_of("one")], DEFAULTS)
    assert re.search(rule.replace("[", r"\[").replace("?", r"\?"), str(error.value))


def test_answer_ends_when_its_client_has_gone():
    speaker = speaker_of("one")
    job = job_of({"messages": QUICK}, [speaker], DEFAULTS)

    def pieces() -> Iterator[str]:
        yield "a"
        job.left = True
        yield "b"
        raise AssertionError("nobody reads it")

    said = SimpleNamespace(ended=False, tokens=[1, 2])
    speaker.answer = lambda *_, **__: SimpleNamespace(pieces=pieces, said=said)
    job.run()
    assert [*job.texts()] == ["a", "b"] and (job.finish, job.tokens) == ("length", 2)


def test_taken_port_is_one_line():
    with Server(0, [], DEFAULTS) as server, pytest.raises(ConfigError) as error:
        Server(server.server_port, [], DEFAULTS)
    text = f"serve={server.server_port}: cannot listen there: {os.strerror(98)}"
    assert str(error.value) == f"{text}; choose a free port"
