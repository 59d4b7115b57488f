"""Overrides as one types them in a shell."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys

import pytest

from app.shell import shell_line, shell_word

NAMES = ["\u00fc '\"$x\\", "\u65e5/a", "a\udcffb"]
SHELLS = [shell for shell in ("bash", "zsh", "ksh") if shutil.which(shell)]


def read_by(shell: str, words: str) -> list[bytes]:
    """Return the arguments that a shell makes of a line."""
    script = f"printf '%s\\0' {words}"
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    return subprocess.run([shell, "-c", script], capture_output=True, env=env).stdout.split(b"\0")[
        :-1
    ]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", NAMES)
def test_word_that_stdout_lacks_can_be_retyped(
    name: str, shell: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    line = shell_line(["train.py", f"run_dir={name}"])
    assert line.isascii()
    assert read_by(shell, line) == [b"train.py", b"run_dir=" + os.fsencode(name)]
    word = shell_word("resume", name)
    assert word.isascii() and b"resume='" in read_by(shell, word)[0]
    monkeypatch.undo()
    assert read_by(shell, shell_word("resume", name)) == read_by(shell, word)


def test_word_that_stdout_has_is_readable():
    assert shell_word("run_dir", "\u00fc") == "\"run_dir='\u00fc'\""
    assert shell_line(["a b", "c"]) == "'a b' c"
