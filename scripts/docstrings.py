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

LEFT_OUT = {"test", "tests", "idle_test", "lib2to3"}  # folders of tests, and of broken files for them
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


def main(out: str, *named: str) -> None:
    """Write the file."""
    library = (Path(name) for name in stdlib_files())
    own = (path for path in library if path.suffix == ".py" and not LEFT_OUT & {*path.parts})
    files = [Path(name) for name in named] or [*own]
    with open(out, "w", encoding="utf-8") as file:
        count = 0
        for count, row in enumerate(conversations(files), start=1):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{out}: {count:,} conversations of {len(files):,} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
