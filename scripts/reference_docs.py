"""Write docs/keys.md and docs/commands.md: every configuration key, every program.

    python scripts/reference_docs.py

Keys come from the fields of app/config and the comments beside them, choices from app/choices.py,
options from conf/, programs from their --help.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import tokenize
import typing
from collections.abc import Iterator
from enum import Enum
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from app.cli.options import other_names
from app.cli.options.compose import load_overrides
from app.cli.options.keys import all_keys, is_section, type_of
from app.config import Run
from app.config.advanced import is_advanced
from app.errors import typed

ROOT = Path(__file__).resolve().parent.parent
CONF, DOCS = ROOT / "conf", ROOT / "docs"
COMMAND = "python scripts/reference_docs.py"
PROGRAMS = ("train", "plan", "data", "tokenizer", "report", "convert", "generate", "chat",
            "evaluate", "calibrate", "doctor", "tune", "torchrun")  # fmt: skip
SCRIPTS = ("train_local.sh", "train.sbatch", "sweep.sbatch")
TOP, ADVANCED = "Top level", "Advanced"
KEYS_TABLE = ("| key | type | default | unit | meaning |", "|---|---|---|---|---|")
TYPES = {int: "int", float: "float", bool: "bool", str: "text", Any: "any"}
UNITS = {
    "_gib": "GiB", "_gb_s": "GB/s", "_tflops": "TFLOP/s", "_us": "µs", "_ms": "ms", "_s": "s",
}  # by the end of a key's name  # fmt: skip
COUNTED = {
    "bits", "experts", "groups", "heads", "layers", "microbatches", "overflows", "parameters",
    "processes", "ranks", "rows", "samples", "sequences", "slots", "stages", "steps", "tokens",
}  # units that are the last word of a key, or near the beginning of its comment  # fmt: skip
KEYS_HEAD = """\
# Configuration keys

Every key that `train.py` and the other programs take as `section.key=value`, and every option that
a group takes as `group=option`. An unknown key, a wrong type or an impossible combination is
refused before training starts. `python train.py --cfg job` prints the composed configuration.
Keys that few runs set are under [Advanced](#advanced), at the end. Completion and `--cfg job` leave
them out unless they are set (`--cfg all` prints them); otherwise they are like all keys.

`{command}` writes this page from `app/config` and `conf/`.

| section | what it sets | options |
|---|---|---|
"""
COMMANDS_HEAD = """\
# Commands

Every program and its arguments. A program that ends because of a mistake prints one line and exits
with 2; all exit codes: [messages.md](messages.md#exit-codes). Keys and options that most of them
take as overrides: [keys.md](keys.md). Messages and `--help` of an installed program name the others
as they are installed, and pages by the path at which the package has them.

`{command}` writes this page from the programs' `--help`.

| program | installed as | what it does |
|---|---|---|
"""


def comments(code: type) -> dict[str, str]:
    """Return the comment beside, or in the lines above, each field of a dataclass and each member
    of an enum.
    """
    lines, _ = inspect.getsourcelines(code)
    source = "".join(lines)
    beside: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            kind = beside if token.line[: token.start[1]].strip() else alone
            kind[token.start[0]] = token.string.lstrip("# ")
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node in tree.body:
        if name := _name_of(node):
            above, line = [], node.lineno - 1
            while line in alone:
                above.append(alone[line])
                line -= 1
            words = [*reversed(above), beside.get(node.end_lineno or node.lineno, "")]
            found[name] = " ".join(filter(None, words))
    return found


def _name_of(node: ast.stmt) -> str | None:
    """Return the name of a field or member; of a member that no identifier can name, its value."""
    match node:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=str(name)))]):
            return name
    return None


def kinds(hint: Any) -> list[Any]:
    """Return what an annotation allows, None aside."""
    found = [kind for kind in (typing.get_args(hint) or (hint,)) if kind not in (NoneType, ...)]
    return list(dict.fromkeys(found))


def takes_null(hint: Any) -> bool:
    """Return whether the annotation allows None."""
    return NoneType in typing.get_args(hint)


def type_name(hint: Any) -> str:
    """Return the name of a key's type."""
    (kind, *_) = kinds(hint)
    is_enum = isinstance(kind, type) and issubclass(kind, Enum)
    name = "choice" if is_enum else TYPES[kind]
    name = f"list of {name}" if typing.get_origin(hint) is tuple else name
    return f"{name} or null" if takes_null(hint) else name


def unit(key: str, hint: Any, comment: str) -> str:
    """Return the unit of a number: by the end of its name, or the first words of its comment."""
    if not set(kinds(hint)) <= {int, float}:
        return ""
    for end, found in UNITS.items():
        if key.endswith(end):
            return found
    words = [re.split(r"[._]", key)[-1], *re.findall(r"\w+", comment)[:2]]
    return next((word for word in words if word in COUNTED), "")


def cell(text: str) -> str:
    """Return text as a table's cell, pages of docs/ as links."""
    text = re.sub(r"([|*<])", r"\\\1", text)
    return re.sub(r"\bdocs/([\w-]+\.md)", _link, text)


def _link(page: re.Match[str]) -> str:
    return f"[{page[1]}]({page[1]})" if (DOCS / page[1]).exists() else page[0]


def choices(hint: Any) -> str:
    """Return the values of an enum with their comments."""
    found = []
    for kind in kinds(hint):
        if isinstance(kind, type) and issubclass(kind, Enum):
            said = comments(kind)
            for each in kind:
                note = cell(said.get(each.name, ""))
                found.append(f"`{each.value}` ({note})" if note else f"`{each.value}`")
    return ", ".join(found)


@cache
def composed() -> Run:
    """Return the run of `python train.py`."""
    return load_overrides([])


def default(key: str, field: dataclasses.Field[Any]) -> str:
    """Return a key's default, and what `python train.py` has instead where its options set it."""
    if field.default is dataclasses.MISSING:
        return "required"
    text = f"`{typed(field.default)}`"
    value: object = composed()
    for name in key.split("."):
        value = getattr(value, name, None)
    option = chosen().get(key.partition(".")[0])
    if value not in (None, field.default):
        text += f" (`{option}`: `{typed(value)}`)"
    return text.replace("|", r"\|")


def owner_of(section: str) -> type:
    """Return the dataclass of a section; that of a run for the empty name."""
    if not section:
        return Run
    kind: type = kinds(type_of(section))[0]
    return kind


def sections() -> list[str]:
    """Return the dotted names of all sections, the top level first as an empty name."""
    return ["", *filter(is_section, all_keys())]


def rows_of(section: str, *, advanced: bool = False) -> Iterator[str]:
    """Yield the table rows of a section's own keys: of the advanced ones, or of the others."""
    kind = owner_of(section)
    said = comments(kind)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        key = f"{section}.{field.name}" if section else field.name
        if is_section(key) or is_advanced(key) != advanced:
            continue
        hint, comment = hints[field.name], said[field.name]
        if not (comment or choices(hint)):
            raise ValueError(f"app/config: {key} has no comment")
        meaning = ": ".join(filter(None, (cell(comment), choices(hint))))
        shown = (type_name(hint), default(key, field), unit(key, hint, comment), meaning)
        yield f"| `{key}` | {' | '.join(shown)} |"


def first_paragraph(code: Any) -> str:
    """Return the beginning of a docstring in one line."""
    text = inspect.cleandoc(code.__doc__ or "").partition("\n\n")[0]
    return cell(re.sub(r"\s+", " ", text))


@cache
def chosen() -> dict[str, str]:
    """Return the option that conf/train.yaml chooses of each group."""
    listed = yaml.safe_load((CONF / "train.yaml").read_text())["defaults"]
    found = {}
    for each in listed:
        if isinstance(each, dict):
            found |= {group: str(option) for group, option in each.items()}
    return found


def options_of(group: str) -> Iterator[str]:
    """Yield the table rows of a group's options: their first comment and what they set."""
    for path in sorted((CONF / group).glob("*.yaml")):
        text = path.read_text()
        head = re.match(r"(?:#.*\n)+", text)
        lines = head[0].splitlines() if head else []
        said = " ".join(line.lstrip("# ") for line in lines if "@package" not in line)
        name = f"{'+' if group == 'experiment' else ''}{group}={path.stem}"
        usual = " (default)" if chosen().get(group) == path.stem else ""
        yield f"| `{name}`{usual} | {cell(said)} |"


def anchor(heading: str) -> str:
    """Return what a link names a heading by."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def groups() -> list[str]:
    """Return the groups of conf/."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def summary_of(section: str) -> str:
    """Return what a section sets; where it may be null, what that means."""
    if not section:
        return "folder of the run and what it resumes from"
    holder, _, name = section.rpartition(".")
    comment = cell(comments(owner_of(holder))[name])
    if not comment.startswith("null"):
        return comment
    return (
        re.split(r"\. | \(|[:,]", first_paragraph(owner_of(section)))[0].rstrip(".")
        + f"; {comment}"
    )


def keys_page() -> str:
    """Return the contents of docs/keys.md."""
    index, parts = [], []
    for section in sections():
        if is_advanced(section):
            continue
        heading = section or TOP
        options = [path.stem for path in sorted((CONF / section).glob("*.yaml")) if section]
        listed = ", ".join(f"`{name}`" for name in options)
        index.append(f"| [{heading}](#{anchor(heading)}) | {summary_of(section)} | {listed} |")
        parts += [f"\n## {heading}\n"]
        if section:
            parts += [first_paragraph(owner_of(section)), ""]
        if options:
            parts += ["| option | what it is |", "|---|---|", *options_of(section), ""]
        if rows := [*rows_of(section)]:
            parts += [*KEYS_TABLE, *rows]
    index.append(f"| [experiment](#experiment) | {experiments()} |")
    parts += ["\n## experiment\n", "A whole run in one option, added by `+`.\n"]
    parts += ["| option | what it is |", "|---|---|", *options_of("experiment")]
    index.append(f"| [{ADVANCED}](#{anchor(ADVANCED)}) | keys that few runs set |  |")
    whole = [section for section in sections() if is_advanced(section)]
    parts += [f"\n## {ADVANCED}\n", "Sections all of whose keys are advanced:\n"]
    parts += [f"- `{section}`: {summary_of(section)}" for section in whole]
    rows = [row for section in sections() for row in rows_of(section, advanced=True)]
    parts += ["", *KEYS_TABLE, *rows]
    return KEYS_HEAD.format(command=COMMAND) + "\n".join([*index, *parts]) + "\n"


def experiments() -> str:
    """Return the cells of the index for experiments."""
    names = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
    return "keys of several sections at once | " + ", ".join(f"`{name}`" for name in names)


@cache
def help_of(name: str) -> str:
    """Return what a program prints for --help."""
    if name == "train":
        command = [sys.executable, "train.py", "--help"]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    elif name in SCRIPTS:
        command = ["bash", f"scripts/{name}", "--help"]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    else:
        text = import_module(f"app.cli.{name}").HELP
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def title(name: str) -> str:
    """Return what a program does, as its --help says it first."""
    first = help_of(name).partition("\n")[0]
    return cell(re.sub(r"^== Graphfold: | ==$", "", first).rstrip("."))


def commands_page() -> str:
    """Return the contents of docs/commands.md."""
    index, parts = [], []
    for name in PROGRAMS:
        started = "python train.py" if name == "train" else f"python -m app.cli.{name}"
        if name == "torchrun":
            said = "torchrun that keeps exit codes"
            shown = inspect.cleandoc(_docstring("torchrun"))
            installed = ""
        else:
            said, shown, installed = title(name), help_of(name), f"`graphfold-{name}`"
        index.append(f"| [`{started}`](#{anchor(name)}) | {installed} | {said} |")
        parts += [f"\n## {name}\n", "```text", shown, "```"]
    for name in SCRIPTS:
        index.append(f"| [`scripts/{name}`](#{anchor(name)}) | | {title(name)} |")
        parts += [f"\n## {name}\n", "```text", help_of(name), "```"]
    return COMMANDS_HEAD.format(command=COMMAND) + "\n".join([*index, *parts]) + "\n"


def _docstring(name: str) -> str:
    """Return a module's docstring without loading it."""
    text = (ROOT / f"app/cli/{name}.py").read_text()
    return ast.get_docstring(ast.parse(text)) or ""


def other_names_page() -> str:
    """Return the contents of docs/other-names.md: its first paragraphs are written by hand."""
    head, _, _ = (DOCS / "other-names.md").read_text().partition("\n## ")
    return head + "\n" + "\n".join(other_names.page()).lstrip("\n") + "\n"


PAGES = {
    "keys.md": keys_page,
    "commands.md": commands_page,
    "other-names.md": other_names_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
