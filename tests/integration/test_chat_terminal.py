"""`python -m app.cli.chat` at a terminal: keys, pasted text, answers in columns."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from app.cli.chat_terminal import Terminal
from app.data.tokenizer import ByteTokenizer
from app.engine.decoding.conversation import Answer
from app.engine.decoding.drawing import Sampling
from app.engine.decoding.texts import Continuation

TEXT = "größer 日本 🙂 "
WAIT_S = 60
TOKENIZER = ByteTokenizer()
UP, CTRL_C, CTRL_D = "\x1b[A", "\x03", "\x04"


def speaker(name: str, count: int) -> Any:
    """Say a text over and over, a byte at a time."""

    def tokens() -> Iterator[int]:
        for number in range(count):
            time.sleep(0.001)
            yield TEXT.encode()[number % len(TEXT.encode())]

    return SimpleNamespace(
        name=name,
        text=SimpleNamespace(decoder=SimpleNamespace(model=SimpleNamespace(device="cpu"))),
        prompt=lambda said: [1],
        answer=lambda *_, **__: Answer(tokens(), Continuation(TOKENIZER)),
    )


class Shell:
    """A conversation in a child process, and the keys and the screen of its terminal."""

    def __init__(self, folder: Path, speakers: list[Any], columns: int) -> None:
        self.screen = ""
        self.pid, self.file = pty.fork()
        if not self.pid:
            try:
                os.closerange(3, 1 << 10)  # pipes of pytest, whose ends others wait for
                os.chdir(folder)
                # readline, which pytest has loaded, would draw its line anew
                signal.signal(signal.SIGWINCH, signal.SIG_IGN)
                size = struct.pack("HHHH", 24, columns, 0, 0)
                fcntl.ioctl(0, termios.TIOCSWINSZ, size)
                for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
                    os.environ.pop(name, None)
                os.environ.update(TERM="xterm", INPUTRC="/dev/null", COLUMNS=str(columns))
                signal.signal(signal.SIGINT, signal.default_int_handler)
                Console._environ = os.environ  # rich may have seen a copy, of another terminal
                sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, (0, 1, 2), "rww")
                Terminal(speakers, None, 1 << 30, sampling=Sampling(0.7), seed=1).talk()
                sys.stdout.flush()
            finally:
                os._exit(sys.exc_info()[0] is not None)

    def press(self, keys: str) -> None:
        os.write(self.file, keys.encode())

    def until(self, text: str, again: str = "") -> str:
        """Return the screen up to this text, and forget that; press `again` each silent second."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.screen:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(self.screen)
            if select.select([self.file], [], [], 1)[0]:
                self.screen += os.read(self.file, 1 << 16).decode()  # raises at half a character
            elif again:
                self.press(again)
        shown, _, self.screen = self.screen.partition(text)
        return shown

    def ended(self) -> int:
        deadline = time.monotonic() + WAIT_S
        while not (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)
        code = os.waitstatus_to_exitcode(found[1])
        os.close(self.file)
        return code


def test_keys_stop_answers_recall_lines_and_paste(tmp_path: Path):
    shell = Shell(tmp_path, [speaker("one", 1 << 30)], columns=80)
    shell.until("/help lists the commands")
    shell.until("> ")
    shell.press("hello\r")
    shell.until("🙂 größer 日本")
    shell.press(CTRL_C)
    shell.until("> ")
    shell.press(f"{UP}\r")  # the line before
    shell.until("größer")
    shell.press(CTRL_C)
    shell.until("> ")
    shell.press("\x1b[200~def f():\n    pass\x1b[201~\r")
    shell.until("größer")
    shell.press(CTRL_C)
    shell.until("> ")
    shell.press("/save said\r")
    shell.until("appended to said: 6 messages")
    shell.until("> ")
    shell.press(CTRL_C)
    # a signal between the prompt and the wait for keys is noticed at the next one
    shell.until("/quit or Ctrl-D leaves", again=CTRL_C)
    shell.until("> ")
    shell.press(CTRL_D)
    assert shell.ended() == 0
    messages = json.loads((tmp_path / "said").read_text())["messages"]
    asked, answers = ([each["content"] for each in messages[nth::2]] for nth in (0, 1))
    assert asked == ["hello", "hello", "def f():\n    pass"]
    assert all((TEXT * 9999).startswith(answer) and "größer" in answer for answer in answers)


@pytest.mark.parametrize(("columns", "beside"), [(120, True), (60, False)], ids=["wide", "narrow"])
def test_two_answers_stand_beside_on_a_wide_terminal(tmp_path: Path, columns: int, beside: bool):
    size = len(TEXT.encode())
    speakers = [speaker("one", 2 * size), speaker("two", size)]
    shell = Shell(tmp_path, speakers, columns)
    shell.until("> ")
    shell.press("hello\r")
    last = f"two ended after {size} tokens" if beside else f"ended after {size} tokens"
    shown = shell.until(last) + last  # a terminal may show the prompt again before that
    shell.until("> ")
    shell.press(CTRL_D)
    assert shell.ended() == 0
    lines = [re.sub(r"\x1b\[[\d;?]*\w", "", line).strip() for line in shown.splitlines()]
    both = rf"{TEXT * 2} +{TEXT.strip()}"
    assert any(re.fullmatch(both, line) for line in lines) is beside
    assert ("== one ==" in lines and "== two ==" in lines) is not beside
    ends = [f"one ended after {2 * size} tokens", f"two ended after {size} tokens"]
    told = ends if beside else [line.removeprefix("one ").removeprefix("two ") for line in ends]
    assert [line.removeprefix("chat: ") for line in lines if "ended after" in line] == told
