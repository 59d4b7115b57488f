"""What the scripts of GPU runs start: every run is one that Graphfold accepts, so that none is lost
to a refusal on rented machines.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from app.cli.options.compose import load_overrides
from app.data.tokenizer import json_tokenizer
from tests.cases import covering

ROOT = Path(__file__).parents[2]
SCRIPTS = ("one_gpu.sh", "two_gpus.sh", "four_gpus.sh", "echo.sh", "echo.sh short")
# instead of starting anything: a line of its arguments, parted as no argument is
TOLD = '#!/bin/sh\n{ for each; do printf "%s\\037" "$each"; done; echo; } >> "$TOLD"\n'


def bench(name: str) -> ModuleType:
    """A program of bench/, imported."""
    if str(ROOT / "bench") not in sys.path:
        sys.path.append(str(ROOT / "bench"))
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / f"bench/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


def started(script: str, folder: Path) -> Iterator[tuple[int, str, list[str]]]:
    """GPUs, program and arguments of all that a script starts."""
    for name in ("timeout", "python3"):
        (folder / name).write_text(TOLD)
        (folder / name).chmod(0o755)
    told = folder / "told"
    env = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PEER": "peer.py",
        "CORPUS": "books",
        "TOLD": str(told),
    }
    name, *parts = script.split()
    call = "bash", ROOT / "bench" / name, folder / "made", *parts
    subprocess.run(call, env=env, check=True, cwd=ROOT)
    assert (folder / "made").is_dir()
    for line in told.read_text().splitlines():
        words = line.split("\037")[:-1]
        assert "pytest" not in words or "-m gpu" in line.replace("\037", " "), "else it runs none"
        programs = [n for n, word in enumerate(words) if word.startswith("bench/")]
        if not programs:  # a command of Graphfold's, or what a script asks torch
            continue
        at = programs[0]
        gpus = "--nproc-per-node"
        count = int(words[words.index(gpus) + 1]) if gpus in words[:at] else 1
        yield count, Path(words[at]).stem, words[at + 1 :]


def overrides_of(program: str, arguments: list[str]) -> Iterator[list[str]]:
    """Of each run of a program, our overrides; nothing for programs without any."""
    words = [word for word in arguments if "=" in word or word == "/"]
    if program == "step_profile":
        for slash, run in itertools.groupby(words, "/".__eq__):
            if not slash:
                yield [word for word in run if not word.startswith("hot=")]
    elif program == "graphs":
        graphs = bench("graphs")
        for case in words:
            chosen, captured = graphs.overrides_of(case)
            yield [*chosen, "cuda_graph=none"]
            yield [*chosen, *captured]
    elif program == "fp8_losses":
        losses = bench("fp8_losses")
        experiment = arguments[arguments.index("--experiment") + 1]
        for run in dict(losses.runs(experiment, range(1), losses.WAYS[experiment])).values():
            yield ["parallel.dp=1", "cuda_graph=full_iteration", *run, *words]


def runs_of(script: str, folder: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """GPUs and our overrides of every run that a script starts."""
    for gpus, program, arguments in started(script, folder):
        assert (ROOT / "bench" / f"{program}.py").exists()
        if program == "compare":
            compare = bench("compare")
            args, overrides = compare.read_arguments(arguments)
            for setting in compare.all_settings(args, overrides):
                if setting.who == "ours":
                    start = setting.command.index(f"--skip={args.skip}") + 1
                    yield args.gpus, tuple(setting.command[start:])
        for words in overrides_of(program, arguments):
            yield gpus, tuple(words)


@pytest.mark.full
def test_runs_with_every_override_of_scripts_are_accepted(tmp_path: Path):
    """The fewest runs of all scripts that have every override and number of GPUs."""
    runs: list[tuple[int, tuple[str, ...]]] = []
    for script in SCRIPTS:
        folder = tmp_path / script
        folder.mkdir()
        found = list(runs_of(script, folder))
        assert len(found) > 5
        runs += found
    for nth in covering([(gpus, *words) for gpus, words in runs], 1):
        gpus, words = runs[nth]
        load_overrides(words, gpus)


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_run_of_a_script_is_accepted(script: str, tmp_path: Path):
    for gpus, words in dict.fromkeys(runs_of(script, tmp_path)):
        load_overrides(words, gpus)


def test_losses_are_measured_on_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch):
    losses = bench("fp8_losses")
    monkeypatch.setattr(losses.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert losses.visible_gpus() == ["1", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert losses.visible_gpus() == ["0", "1"]
    monkeypatch.setattr(losses.torch.cuda, "device_count", lambda: 0)
    assert losses.visible_gpus() == [""]  # a CPU


def test_losses_off_bf16_are_told_with_standard_error():
    losses = bench("fp8_losses")
    plain = {"bf16-0": 1.0, "bf16-1": 2.0, "bf16-2": 4.0}
    found = dict(losses.means({"current-0": 1.01, "current-1": 2.06, "block-3": 1.0}, plain))
    assert found == {
        "bf16": {"seeds": 3, "val_loss": 2.3333, "off_percent": 0.0},
        "current": {
            "seeds": 2,
            "val_loss": 1.535,
            "off_percent": 2.333,
            "standard_error": 1.0,
            "of_each_seed": [1.0, 3.0],
        },
    }, "percents of 1 and 3 differ by 1 from their mean; block-3 has nothing to be compared with"
    assert "standard_error" not in dict(losses.means({"current-0": 1.01}, plain))["current"]


@pytest.mark.full
def test_errors_of_each_layer_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    few = "model.num_layers=1", "train.seq_len=64", "data.path=app/choices.py", "train.device=cpu"
    monkeypatch.setattr(sys, "argv", ["fp8_errors.py", "--steps", "2", *few])
    bench("fp8_errors").main()
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4
    for row in rows:
        name, plain, *recipes = [each.strip() for each in row.strip("|").split("|")]
        assert name.startswith("layers.0.") and len(recipes) == 3
        assert all(float(each) < 0.5 for each in plain.split(" / ")), row
        for errors in recipes:  # of three bits behind the leading one, or two
            assert all(0.5 < float(each) < 10 for each in errors.split(" / ")), row


def test_texts_and_their_tokenizer_are_what_a_run_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "inner").mkdir(parents=True)
    for n in range(5):
        (source / "inner" / f"{n}.md").write_text(f"the {n}th of five texts " * 20)
    (source / "short.md").write_text("short")
    pattern = f"{source}/**/*.md"
    given = [str(out), pattern, "--every", "2", "--at-least", "100", "--ids", "300"]
    monkeypatch.setattr(sys, "argv", ["corpus.py", *given])
    bench("corpus").main()
    texts = sorted((out / "texts").iterdir())
    assert [text.read_text()[:7] for text in texts] == ["the 0th", "the 2th", "the 4th"]
    assert "3 texts" in capsys.readouterr().out
    tokenizer = json_tokenizer(out / "tokenizer.json")
    ids = tokenizer.encode("the text")
    assert tokenizer.decode(ids) == "the text" and len(ids) < len("the text")
    assert tokenizer.eod == 0 and tokenizer.vocab_size <= 300
