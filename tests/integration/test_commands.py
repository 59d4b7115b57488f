"""Every command in the pages, in `--help` and in the heads of scripts is one that its program
takes: runs are composed, held to all rules and, where they are small, planned. Commands of other
programs are listed here; what is neither fails.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from app.cli import (
    calibrate,
    chat,
    convert,
    data,
    doctor,
    evaluate,
    generate,
    plan,
    tokenizer,
    tune,
)
from app.cli.options.arguments import SWEEPS, Typed, key_of
from app.cli.options.compose import load_typed
from app.cli.options.explained import COMPOSING, explained
from app.cli.options.request import Words
from app.cli.options.unknown import is_known
from app.cli.plan import MOST_PLANNED
from app.config import Run
from app.errors import ConfigError
from app.planner.plan import Plan
from tests.cases import chosen
from tests.override_types import check_types
from tests.training import ROOT

pytestmark = pytest.mark.docs

ROOT_PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS")]
PAGES = [*ROOT_PAGES, *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = sorted((ROOT / "scripts").glob("*.s*"))
PROGRAMS = ("plan", "data", "tokenizer", "report", "convert", "generate", "chat", "evaluate")
PROGRAMS += ("calibrate", "doctor", "tune")
# commands of others, of the shell, and what they write with <<
ELSEWHERE = {"git", "cd", "source", "ls", "mkdir", "cat", "printf", "export", "pip", "pipx", "hf"}
ELSEWHERE |= {"lm_eval", "nvidia-smi"}
# what a run needs that is not here: a model of Hugging Face, files that a page makes
NOT_HERE = ("model.init_from=", "data.tokenizer=", "--config-dir")
PLACEHOLDER = re.compile(r"<[a-z -]+>|…|\.\.\.|\bNAME\b|\[(?!\w+[],]|\w+/)")
HERE_DOCUMENT = re.compile(r"(<<'?(\w+)'?)\n.*?\n\2$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A line that somebody may type."""

    where: str
    line: str
    refused: bool  # it shows a mistake


def of_page(path: Path) -> Iterator[Command]:
    """The commands of a page's blocks; behind one that is refused stands what is said."""
    for kind, text in re.findall(
        r"^```(bash|console)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL
    ):
        block = HERE_DOCUMENT.sub(r"\1", text.replace("\\\n", " "))
        lines = block.splitlines()
        for line, behind in zip(lines, [*lines[1:], ""], strict=True):
            if kind == "bash" and line.strip() and not line.lstrip().startswith("#"):
                yield Command(path.name, line, False)
            elif kind == "console" and line.startswith("$ "):
                refused = re.match(r"(train\.py|plan): [\w.=+-]+", behind) is not None
                yield Command(path.name, line[2:], refused)


def of_help() -> Iterator[Command]:
    """Those that the programs' own pages show, without the lines of their usage."""
    texts = {name: import_module(f"app.cli.{name}").HELP for name in PROGRAMS}
    texts["train"] = (ROOT / "conf/train.yaml").read_text()
    for name, text in texts.items():
        for line in re.findall(r"^ +((?:python|torchrun|graphfold-\w+) .*)$", text, re.MULTILINE):
            yield Command(f"{name} --help", line, False)


def of_scripts() -> Iterator[Command]:
    for path in SCRIPTS:
        for line in re.findall(r"^#   (.+)$", path.read_text(), re.MULTILINE):
            yield Command(path.name, line, False)


COMMANDS = list(
    dict.fromkeys([*(c for page in PAGES for c in of_page(page)), *of_help(), *of_scripts()])
)


def words_of(line: str) -> list[str]:
    """The words of one command: without a comment, what follows it, and variables before it."""
    line = re.sub(r"^\w+=\$\((.*)\)$", r"\1", line)
    text = re.split(r"\s#|  +#|\s(?:\|\||&&|\||>)\s", line)[0]
    words = shlex.split(re.sub(r"<<.*", "", text))
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


def program_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The program that gets the last arguments, whatever launches it, and these arguments."""
    for place, word in enumerate(words):
        starts = Path(word).parent.name == "scripts" and not word.endswith(".py")
        if word in ("train.py", "graphfold-train") or starts:
            rest = list(words[place + 1 :])
            if word.endswith("train_local.sh") and rest[:1] == ["-n"]:
                rest = rest[2:]
            if word.endswith("sweep.sbatch"):
                rest = rest[1:]  # the file of lines
            return "train", rest
        if word == "-m" and words[place + 1].startswith("app.cli."):
            name = words[place + 1].removeprefix("app.cli.")
            if name != "torchrun":
                return name, list(words[place + 2 :])
        if word.startswith("graphfold-"):
            return word.removeprefix("graphfold-"), list(words[place + 1 :])
        if word.startswith("bench/"):
            return "bench", [word]
    return words[0], list(words[1:])


def world_of(words: Sequence[str]) -> int | None:
    """The processes that a launcher starts; None where train.py does so itself."""
    if not {"scripts/train.sbatch", "app.cli.torchrun", "torchrun"} & set(words):
        return None
    named = dict(re.findall(r"--(n?nodes|nproc-per-node|gpus-per-node)[= ](\d+)", " ".join(words)))
    per_node = named.get("nproc-per-node", named.get("gpus-per-node", "8"))
    return int(named.get("nodes", named.get("nnodes", "1"))) * max(1, int(per_node))


def check_train(arguments: Sequence[str], world: int | None = None) -> None:
    """A run composes and passes the rules; of a sweep, that of every first value."""
    if {"--cfg", "--help", "--info"} & set(arguments):
        return
    words = [word for word in arguments if word not in SWEEPS]
    if any(word.startswith(NOT_HERE) for word in words):
        keys = [key_of(word) for word in Typed.parse(words).overrides]
        assert [key for key in keys if not is_known(key) and key != "experiment"] == []
        return
    if len(words) < len(arguments):
        words = [re.sub(r"(=[^\[({',]+),.*", r"\1", w) for w in words if not w.startswith("hydra")]
        words = [word for word in words if "=tag(" not in word]
    check_plan(load_typed(Typed.parse(words), world))


def check_plan(run: Run) -> None:
    planned = Plan(run)
    if len(planned.stages.in_order) * planned.run.num_microbatches <= MOST_PLANNED:
        assert planned.busiest.total > 0


def check_plan_command(arguments: Sequence[str]) -> None:
    asked = plan.parse(arguments)
    if not any(word.startswith(NOT_HERE) for word in arguments):
        check_plan(load_typed(asked.typed))


def check_words(arguments: Sequence[str]) -> None:
    for word in Words.parse(arguments, {*generate.OWN, *chat.OWN, *evaluate.OWN}).overrides:
        assert is_known(key_of(word)), word


def check_convert(arguments: Sequence[str]) -> None:
    assert arguments[0] in convert.WAYS and len(arguments) == 3


def check_report(arguments: Sequence[str]) -> None:
    assert len(arguments) == 1


def check_make(arguments: Sequence[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for word in arguments if "=" not in word} <= set(targets)


def check_python(arguments: Sequence[str]) -> None:
    """Code that is typed, or a file of the checkout."""
    match arguments:
        case ["-c", code]:
            ast.parse(code)
        case ["-"]:
            pass  # reads what the page writes, which tests/integration/test_data_docs.py runs
        case [path, *_]:
            assert (ROOT / path).is_file(), path


CHECKS: dict[str, Callable[[Sequence[str]], object]] = {
    "train": check_train,
    "plan": check_plan_command,
    "generate": check_words,
    "chat": check_words,
    "evaluate": check_words,
    "convert": check_convert,
    "report": check_report,
    "calibrate": calibrate._parsed,
    "doctor": doctor.DoctorRequest.parse,
    "tune": lambda words: load_typed(tune.parse(words).typed),
    "data": lambda words: load_typed(data.InspectRequest.parse(words).typed),
    "tokenizer": lambda words: check_train(tokenizer.TokenizerRequest.parse(words).words),
    "bench": check_python,
    "make": check_make,
    "python": check_python,
}


def parts_of(command: Command) -> tuple[list[str], str, list[str]]:
    """Words of a command, its program, and the arguments of that."""
    words = words_of(re.sub(r"<[a-z -]+>", "it", command.line))
    return words, *program_of(words)


def composes(command: Command) -> bool:
    """Whether the check of a command composes a run, and perhaps plans it."""
    return parts_of(command)[1] in ("train", "plan")


RUNS = [command for command in COMMANDS if composes(command)]
QUICK = [command for command in COMMANDS if not composes(command)]
for shows_mistake in (False, True):
    QUICK += [command for command in RUNS if command.refused is shows_mistake][::7]


def test_overrides_of_commands_have_the_types_of_their_keys():
    """Of all, also of those whose runs only `make test-all` composes."""
    found = 0
    for command in RUNS:
        _, program, arguments = parts_of(command)
        elsewhere = PLACEHOLDER.search(" ".join(arguments)) or "--config-dir" in arguments
        if not elsewhere and not command.refused:
            typed = plan.parse(arguments).typed if program == "plan" else Typed.parse(arguments)
            check_types(word for word in typed.overrides if word not in SWEEPS)
            found += 1
    assert found > 70


@pytest.mark.parametrize(
    "command", chosen(COMMANDS, QUICK), ids=lambda command: f"{command.where} {command.line}"
)
def test_a_command_is_one_that_its_program_takes(command: Command):
    words, program, arguments = parts_of(command)
    if PLACEHOLDER.search(" ".join(arguments)):  # how it is used, not what is typed
        assert program in CHECKS
    elif command.refused:
        with pytest.raises(COMPOSING) as error:
            CHECKS[program](arguments)
        assert isinstance(explained(error.value), ConfigError)
    elif re.split("=", program)[0] not in ELSEWHERE:
        assert program in CHECKS, "of which program is this? see ELSEWHERE"
        if program == "train":
            check_train(arguments, world_of(words))
        else:
            CHECKS[program](arguments)


def test_commands_of_every_kind_are_found():
    programs = [program_of(words_of(command.line))[0] for command in COMMANDS]
    assert {*CHECKS} <= set(programs)
    assert {command.where for command in COMMANDS} >= {
        "README.md", "plan --help", "train --help", "sweep.sbatch", "generate --help",
    }  # fmt: skip
    assert len(COMMANDS) > 120 and sum(command.refused for command in COMMANDS) >= 8
