"""`python -m app.cli.chat`: turns by the model's template, commands, ends, mistakes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.chat import ChatRequest, Chosen
from app.cli.chat_terminal import DURING, Terminal
from app.cli.options.compose import load_overrides
from app.cli.processes.launcher import Launch
from app.data.tokenizer import JsonTokenizer
from app.engine.decoding.conversation import Answer
from app.engine.decoding.drawing import Sampling
from app.engine.decoding.texts import Continuation
from app.engine.start.kept_tokenizer import keep_tokenizer
from tests.distributed import run_distributed
from tests.integration.chat import TURNS, chatted
from tests.integration.generate import generated, saved
from tests.integration.model_ends import tokenizer_of_words
from tests.integration.test_model_ends import save_chain


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    save_chain(folder, tokenizer_config={"eos_token": "</s>", "chat_template": TURNS})
    return folder


def test_turns_commands_and_two_models(model: Path):
    (model.parent / "plain.jinja").write_text("{{ messages[-1].content }}")
    typed = "the quick\n\nthe\n/temprature 1\n/temperature -1\n/temperature x\n/temperature 0\n"
    typed += "/temperature\n/help\n/save\n"
    typed += "/save nowhere/f\n/save said.jsonl\n/reset\nbrown\n/save said.jsonl\n/quit\nthe\n"
    code, out, err = chatted(model, typed, "temperature=0", "system=the ", f"beside={model}")
    assert code == 0, err
    head = f"== {model} =="
    answers = [" brown fox", " quick brown fox", " fox"]
    assert out.splitlines() == [line for answer in answers for line in [head, answer] * 2]
    said = [json.loads(line) for line in (model.parent / "said.jsonl").read_text().splitlines()]
    assert [len(each["messages"]) for each in said] == [5, 5, 3, 3]
    assert said[0] == said[1] and said[0]["model"] == str(model)
    assert [each["content"] for each in said[0]["messages"]] == [
        "the ", "the quick", answers[0], "the", answers[1],
    ]  # fmt: skip
    assert err.count(f"{model}: chat template of {model}/tokenizer_config.json\n") == 2
    told = [line for line in err.splitlines() if line.startswith("chat: ")]
    for line, rule in zip(told, (
        "command=/temprature: the commands are /reset, /temperature, /save, /help, /quit;",
        "temperature=-1.0: must be at least 0",
        "temperature=x: must be a number",
        "temperature 0",
        "temperature 0",
        "command=/save: needs a file; did you mean /save chat.jsonl?",
        "save=nowhere/f: cannot be written: No such file or directory",
        "appended to said.jsonl: 5 messages",
        "the conversation begins anew",
        "appended to said.jsonl: 3 messages",
    ), strict=True):  # fmt: skip
        assert rule in line
    assert f"\n{DURING}\n" in err


def test_base_model_continues_the_text_of_all_turns(model: Path):
    base = model.parent / "base"
    save_chain(base, tokenizer_config={"eos_token": "</s>"})
    code, out, err = chatted(base, "the\n" + 64 * " the" + "\n", "temperature=0", "stop= fox")
    assert (code, out) == (0, " quick brown\n"), err
    assert f"{base}: no chat template: continues the text of all turns\n" in err
    assert "tokens, and the context holds 64; /reset begins anew\n" in err
    (base / "turns.jinja").write_text("{{ messages[0].content }} brown")
    words = ("template=base/turns.jinja", "max_new_tokens=1", "temperature=0")
    code, out, err = chatted(base, "the quick\n", *words)
    assert (code, out) == (0, " fox\n") and "chat: ended after 1 token\n" in err


def test_text_that_the_template_puts_after_answers_ends_them(model: Path):
    template = TURNS.replace("<turn>", " fox")
    (model.parent / "text.jinja").write_text(template)
    code, out, err = chatted(model, "the quick\n", "template=text.jinja", "temperature=0")
    assert (code, out) == (0, " brown\n") and "ended after" not in err


def test_run_of_bytes_continues_as_generate_does(tmp_path: Path):
    run_distributed(saved, 2, tmp_path / "run/checkpoints")
    words = ("temperature=0", "max_new_tokens=4")
    code, out, err = chatted(tmp_path / "run", "abc\n/save said\nd\n", *words)
    assert code == 0 and "step-00000003: no chat template" in err, err
    *_, (_, answer) = (each.values() for each in json.loads(
        (tmp_path / "said").read_text())["messages"])  # fmt: skip
    for prompt, new in (("abc", answer), (f"abc{answer}d", out[len(answer) + 1 : -1])):
        text = generated(tmp_path / "run", f"prompt={prompt}", *words)[1]
        assert text == f"{prompt}{new}\n"


def test_conversations_of_bytes_end_with_their_turns(tmp_path: Path):
    run_distributed(saved, 2, tmp_path / "run/checkpoints")
    keep_tokenizer(load_overrides(["data=chat", "data.path=x.jsonl"]), tmp_path / "run")
    request, launch = ChatRequest.parse([str(tmp_path / "run")]), Launch(0, 0, None)
    found = Chosen.at(tmp_path / "run", request, launch)
    assert found.stop == ["\x03"] and found.described.endswith("run/chat_template.jinja")
    assert found.template is not None
    assert found.template.text([{"role": "user", "content": "a"}]).endswith("\x02assistant\n")


MISTAKES = {
    ("sytem=a",): "did you mean system?",
    ("beside=nowhere",): "checkpoint=nowhere: does not exist",
    ("template=nowhere.jinja",): "template=nowhere.jinja: cannot be read: No such file",
    ("parallel.tp=2",): "parallel.world_size=2: a conversation has one process",
    ("train.seq_len=1073741824",): "train.seq_len=1073741824: keys and values of 1 text",
}


@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: words[0])
def test_mistakes_of_a_chat_are_one_line(model: Path, words: tuple[str, ...]):
    code, out, err = chatted(model, "", *words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("chat: ") and MISTAKES[words] in err


def test_ctrl_c_ends_an_answer(capsys: pytest.CaptureFixture[str]):
    tokenizer: Any = tokenizer_of_words()
    drawn: list[int] = []

    def tokens() -> Iterator[int]:
        for token in ids:
            drawn.append(token)
            if len(drawn) == 2:
                signal.raise_signal(signal.SIGINT)
            yield token

    found = JsonTokenizer(tokenizer, tokenizer.get_vocab_size(), 2)
    ids = found.encode("the quick brown fox")
    speaker: Any = SimpleNamespace(
        name="words",
        text=SimpleNamespace(decoder=SimpleNamespace(model=SimpleNamespace(device="cpu"))),
        prompt=lambda said: [1],
        answer=lambda *_, **__: Answer(tokens(), Continuation(found)),
    )
    terminal = Terminal([speaker], None, 9, sampling=Sampling(0.7), seed=1)
    before = signal.getsignal(signal.SIGINT)
    terminal._turn("hello")
    assert len(drawn) == 2 and capsys.readouterr() == ("the quick\n", "")
    assert terminal.histories[0][-1] == {"role": "assistant", "content": "the quick"}
    assert signal.getsignal(signal.SIGINT) is before
