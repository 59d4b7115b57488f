"""Write conversations for docs/talk.md: functions without their docstrings, and these as answers.

    python scripts/docstrings.py OUT.jsonl [FILE.py …]

reads the files, or Python's standard library without its tests. An answer is the first paragraph
of a docstring.
"""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.data.paths import stdlib_files

LEFT_OUT = {"test", "tests", "idle_test", "lib2to3"}  # folders of tests
LONGEST = 600  # characters of function and answer together: some 200 tokens


def functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield the functions of a module that have a docstring and more: without it, and it."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring, first = ast.get_docstring(node), node.body[0]
        if docstring and node.lineno < first.lineno:
            code = [*lines[node.lineno - 1 : first.lineno - 1]]
            code += lines[first.end_lineno : node.end_lineno]
            yield textwrap.dedent("\n".join(code)), docstring.split("\n\n")[0]


def conversations(files: Sequence[Path]) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield a conversation for every function of the files that is not too long."""
    for file in files:
        for function, docstring in functions(file.read_text(encoding="utf-8")):
            if len(function) + len(docstring) <= LONGEST:
                said = {"user": function, "assistant": docstring}
                yield {"messages": [{"role": role, "content": said[role]} for role in said]}


def main(*words: str) -> None:
    """Write the file."""
    if not words or words[0].startswith("-"):
        sys.exit(__doc__)
    out, *named = words
    library = (Path(name) for name in stdlib_files())
    own = (path for path in library if path.suffix == ".py" and not LEFT_OUT & {*path.parts})
    files = [Path(name) for name in named] or [*own]
    rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in conversations(files)]
    Path(out).write_text("".join(rows), encoding="utf-8")
    print(f"{out}: {len(rows):,} conversations of {len(files):,} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
