"""`python -m app.cli.chat … serve=PORT`, asked by OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_chat_server import LONG, QUICK, port  # noqa: F401 - a fixture

pytestmark = pytest.mark.full
openai = pytest.importorskip("openai", reason="needs pip install openai (the extra eval)")


@pytest.fixture
def ask(port: int) -> Any:  # noqa: F811
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)
    with client:
        yield client


def said(ask: Any, **asked: object) -> Any:
    return ask.chat.completions.create(**{"model": "model", "messages": QUICK, **asked})


def test_client_reads_answers_and_models(ask: Any):
    assert [each.id for each in ask.models.list()] == ["model"]
    assert ask.models.retrieve("model").owned_by == "graphfold"
    found = said(ask)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", " brown fox")
    usage = found.usage
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    assert choice.finish_reason == "stop" and counts == (2, 2, 4)
    for limit in ("max_tokens", "max_completion_tokens"):
        (cut,) = said(ask, **{limit: 1}).choices
        assert (cut.message.content, cut.finish_reason) == (" brown", "length")
    (stopped,) = said(ask, stop=[" fox"]).choices
    assert (stopped.message.content, stopped.finish_reason) == (" brown", "stop")
    texts = {said(ask, temperature=2, seed=7).choices[0].message.content for _ in range(3)}
    others = {said(ask, temperature=2, seed=n).choices[0].message.content for n in range(9)}
    assert len(texts) == 1 and len(others) > 1


def test_client_reads_a_stream(ask: Any):
    chunks = [*said(ask, stream=True, stream_options={"include_usage": True})]
    texts = [each.choices[0].delta.content for each in chunks[:-1]]
    assert texts == ["", " brown", " fox", None]
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.total_tokens == 4
    with ask.chat.completions.stream(model="model", messages=QUICK) as stream:
        assert stream.get_final_completion().choices[0].message.content == " brown fox"


@pytest.mark.parametrize(
    ("asked", "kind", "param", "code"),
    [
        ({"model": "modl"}, "NotFoundError", "model", "model_not_found"),
        ({"messages": LONG}, "BadRequestError", "messages", "context_length_exceeded"),
        ({"temperature": -1}, "BadRequestError", "temperature", None),
        ({"n": 2}, "BadRequestError", "n", None),
        ({"tools": [{"type": "function"}]}, "BadRequestError", "tools", None),
    ],
    ids=["model", "long", "temperature", "n", "tools"],
)
def test_client_raises_what_is_wrong(
    ask: Any, asked: dict[str, object], kind: str, param: str, code: str | None
):
    with pytest.raises(getattr(openai, kind)) as error:
        said(ask, **asked)
    assert (error.value.param, error.value.code) == (param, code)
    assert error.value.type == "invalid_request_error"
