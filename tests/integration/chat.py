"""Shared by test_chat_command.py and other tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.programs import TIMEOUT_S, Forked

# The chain of `save_chain` says "brown fox<turn> jumps</s>" after "quick".
TURNS = "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}"
TURNS += "<turn>{% endif %}{% endfor %}"


def chatted(folder: Path, typed: str, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a conversation in which `typed` is the input."""
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
    os.write(files[0], typed.encode())
    os.lseek(files[0], 0, os.SEEK_SET)
    line = [sys.executable, "-m", "app.cli.chat", str(folder), *words]
    program = Forked(line, cwd=folder.parent, stdin=files[0], stdout=files[1], stderr=files[2])
    code = program.wait(TIMEOUT_S)
    out, err = (os.pread(file, 1 << 20, 0).decode() for file in files[1:])
    for file in files:
        os.close(file)
    return code, out, err
