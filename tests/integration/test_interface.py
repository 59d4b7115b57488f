"""The Python interface beside the commands: equal numbers, texts and messages, and a caller that is
left as it was.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphfold
from app.cli import plan as plan_command
from app.cli.generate import OWN, Request
from app.cli.options.given import given, given_data, typed_given
from app.cli.options.request import Words
from app.cli.start import hosted
from app.engine.files.attempt import HostedAttempt
from app.engine.files.run_folder import read_metrics
from app.engine.files.signals import stop_signals
from app.engine.ranks.groups import process_world
from app.engine.watchdog.watchdog import EXIT_STUCK
from app.errors import ConfigError
from app.shell import quoted
from graphfold.models import TextOptions
from tests.cases import each
from tests.integration.evaluate import evaluated
from tests.integration.generate import generated
from tests.programs import run_forked
from tests.training import ROOT, corpus_in

SMALL = ("model=dense_tiny", "parallel.pp=2", "parallel.world_size=4", "train.global_batch=64")
STEPS = 3
ENDLESS = "train.steps=100000"
TWO = ("parallel.dp=2", "parallel.ep=2")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return corpus_in(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def state(corpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A run, and what of this process was different after it."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    torch.manual_seed(7)
    before = caller()
    result = graphfold.train([*corpus, f"train.steps={STEPS}", f"run_dir={folder}"])
    after = caller()
    levels = after["levels"]
    assert isinstance(levels, dict) and isinstance(before["levels"], dict)
    after["levels"] = {name: levels[name] for name in before["levels"]}  # without new ones
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    return {"result": result, "changed": changed}


@pytest.fixture(scope="module")
def trained(state: dict[str, object]) -> graphfold.Result:
    result = state["result"]
    assert isinstance(result, graphfold.Result)
    return result


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no loss.png, which takes half of a short one's time."""
    monkeypatch.setattr("app.engine.report.summary.plot_run", lambda *_: None)


def caller() -> dict[str, object]:
    """What a run might leave different in a process."""
    loggers = [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]
    return {
        "environment": dict(os.environ),
        "object": id(os.environ),
        "handlers": [signal.getsignal(number) for number in stop_signals()],
        "folder": Path.cwd(),
        "threads": torch.get_num_threads(),
        "random": torch.get_rng_state().tolist(),
        "group": dist.is_initialized(),
        "levels": {log.name: (log.level, tuple(log.handlers)) for log in loggers},
        "streams": [(id(stream), stream.errors) for stream in (sys.stdout, sys.stderr)],
        "arguments": list(sys.argv),
        "filters": list(warnings.filters),
        "backend": matplotlib.rcParams._get("backend"),
        "gradients": torch.is_grad_enabled(),
        "workers": {thread.name for thread in threading.enumerate()},
    }


def test_import_loads_neither_torch_nor_numpy():
    code = (
        "import sys, time; before = time.process_time(); import graphfold\n"
        "took = time.process_time() - before\n"
        "print(took, *{'torch', 'numpy', 'hydra'} & {*sys.modules})\n"
        "print(graphfold.plan(['model=dense_tiny']).fits, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    took, *rest = done.stdout.split()
    assert rest == ["True", "False"], done.stderr
    assert float(took) < 0.5  # seconds of CPU; a tenth of them on an idle machine


def test_plan_equals_the_command(capsys: pytest.CaptureFixture[str]):
    found = graphfold.plan(SMALL)
    assert plan_command.main(["--json", *SMALL]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert found.to_dict() == printed and found.to_dict("memory").keys() < printed.keys()
    assert plan_command.main(["out=null", *SMALL]) == 0
    assert capsys.readouterr().out.rstrip("\n") == str(found)
    assert (found.world_size, found.layout["pp"], found.fits) == (4, 2, True)
    assert [*found.memory] == [rank["total"] for rank in printed["memory"]]
    assert found.gpu_memory == printed["verdict"]["gpu_memory"]
    estimate = printed["schedule"]["estimate"]
    assert (found.step_seconds, found.gpu_hours) == (estimate["seconds"], estimate["gpu_hours"])
    assert found.tokens_per_second == 4 * estimate["tokens_per_second_per_gpu"]
    assert repr(found).startswith("<Plan of dense_tiny on 4 ranks: ")
    with pytest.raises(ValueError, match="what='layouts' is none of groups"):
        found.to_dict("layouts")


def test_train_returns_what_the_run_reported(trained: graphfold.Result):
    rows = read_metrics(trained.folder)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    metrics = trained.metrics
    assert metrics["step"].tolist() == [0, 1, 2, 3]
    assert metrics["loss"][1:].tolist() == [row["loss"] for row in steps]
    assert math.isnan(metrics["loss"][0]) and metrics["tokens"].dtype == np.float64
    assert trained.loss == steps[-1]["loss"]
    assert trained.validation_loss == metrics["val_loss"][-1] == rows[-1]["val_loss"]
    assert (trained.folder / "ended.json").exists() and "metrics" not in repr(trained)


def test_a_run_leaves_the_caller_as_it_was(state: dict[str, object]):
    assert state["changed"] == {}


@pytest.mark.usefixtures("no_picture")
def test_a_run_is_continued(trained: graphfold.Result, tmp_path: Path):
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    longer = graphfold.train([f"resume={folder}", "train.steps=5"])
    assert longer.folder == folder and longer.metrics["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(longer.metrics["loss"][:4], trained.metrics["loss"], equal_nan=True)


@pytest.mark.full
@pytest.mark.usefixtures("no_picture")
def test_resume_auto_continues_a_run(trained: graphfold.Result, tmp_path: Path):
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    last = graphfold.train(["resume=auto", f"run_dir={folder}", "train.steps=4"])
    assert last.metrics["step"][-1] == 4 and last.loss == last.metrics["loss"][-1]
    with pytest.raises(ConfigError, match=r"train.steps=4: the checkpoint .* has already taken 4"):
        graphfold.train([f"resume={folder}", "train.steps=4"])


@pytest.mark.usefixtures("no_picture")
def test_trains_in_a_thread_and_an_event_loop(
    corpus: tuple[str, ...], trained: graphfold.Result, tmp_path: Path
):
    """As a notebook and a server call it: signals are not for this thread, no stream is a tty."""
    losses = []

    async def cell() -> None:
        words = [*corpus, f"train.steps={STEPS}", f"run_dir={tmp_path}/run"]
        losses.append(graphfold.train(words).metrics["loss"])

    thread = threading.Thread(target=lambda: asyncio.run(cell()))
    thread.start()
    thread.join()
    assert np.array_equal(losses, [trained.metrics["loss"]], equal_nan=True)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)  # to the process: its main thread takes it


def stopped(corpus: tuple[str, ...], folder: Path, tell: Callable[[], None]) -> None:
    """Train in `folder`, and call `tell` once there are metrics."""

    def wait() -> None:
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            time.sleep(0.01)
        tell()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        graphfold.train([*corpus, ENDLESS, f"run_dir={folder}"])
    finally:
        thread.join()


def test_signals_end_a_run_with_a_checkpoint(corpus: tuple[str, ...], tmp_path: Path):
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(graphfold.RunError, match="stopped by SIGTERM after step") as ended:
            stopped(corpus, tmp_path / "a", terminate)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 75 and ended.value.folder == tmp_path / "a"
    assert f"to continue: python train.py resume={tmp_path}/a" in ended.value.message
    assert [*(tmp_path / "a/checkpoints").glob("step-*")]
    with pytest.raises(KeyboardInterrupt, match="stopped by Ctrl-C after step"):
        stopped(corpus, tmp_path / "b", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is interrupt


def test_a_second_request_interrupts_and_exits_nothing():
    attempt = HostedAttempt()
    for code in (75, 130):
        with pytest.raises(KeyboardInterrupt):
            attempt.end_process(code)
    attempt.end_process(EXIT_STUCK)


def test_a_diverged_run_raises_its_exit_code(corpus: tuple[str, ...], tmp_path: Path):
    words = [*corpus, "optim.lr=1e15", "train.steps=30", "train.on_bad_step=stop"]
    with pytest.raises(graphfold.RunError, match="exit code 65: step 2 has loss nan") as ended:
        graphfold.train([*words, f"run_dir={tmp_path}/run"])
    assert ended.value.code == 65 and not dist.is_initialized()


def test_mistakes_are_told_as_by_the_command(capsys: pytest.CaptureFixture[str]):
    words = ["train.steps=few"]
    with pytest.raises(SystemExit, match="2"):
        plan_command.main(words)
    said = capsys.readouterr().err
    for function in (graphfold.plan, graphfold.train):
        with pytest.raises(ConfigError) as error:
            function(words)
        assert said == f"plan: {error.value}\n"
        assert graphfold.ConfigError is ConfigError and isinstance(error.value, ValueError)


@pytest.mark.full
@each(
    [
        (("parallel.tp=3", "model=dense_tiny"),),
        (("resume=/nowhere",),),
        (("data=text", "data.path=[/nowhere]"),),
        (("--lr", "3"),),
    ]
)
def test_mistakes_of_training_are_told_likewise(words: tuple[str, ...], tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        graphfold.train(words)
    done = run_forked(tmp_path, [sys.executable, "-m", "app.cli.train", *words])
    assert (done.returncode, done.stderr) == (2, f"train.py: {error.value}\n")


@each(
    [
        (("-m", "optim.lr=1,2"), "option=-m: is for a command line"),
        (("--help",), "option=--help: is for a command line"),
        (("--lr", "3"), "option=--lr 3: is optim.lr here"),
        (("hydra.run.dir=x",), "hydra.run.dir=x: is not read"),
    ]
)
def test_flags_of_programs_are_refused(words: tuple[str, ...], said: str):
    with pytest.raises(ConfigError) as error:
        typed_given(words)
    assert str(error.value).startswith(said)


def test_overrides_are_a_list_of_texts():
    for wrong in ("train.steps=3", [3], [Path("x")]):
        with pytest.raises(TypeError, match="overrides are a list of texts"):
            given(wrong)
    assert given(("a=1",)) == ["a=1"]
    with pytest.raises(ConfigError, match="is no key of data; the model is loaded already"):
        given_data(["parallel.tp=2"])


def test_one_of_several_ranks_starts_no_run(monkeypatch: pytest.MonkeyPatch):
    for name, text in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("MASTER_PORT", "2000")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2: is one of several ranks"):
        graphfold.train(["model=dense_tiny"])


RANKS = """
import os, pathlib, sys
pathlib.Path(os.environ["GRAPHFOLD_FOLDER_NOTED_IN"]).write_text(sys.argv[2])
print("step 1")
print("warning", "train.py: key=1: is no 2", "", sep="\\n", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def started_ranks(code: int, corpus: tuple[str, ...], patch: pytest.MonkeyPatch) -> None:
    """Train on two ranks, for which a script stands that ends with this exit code."""
    command = [sys.executable, "-c", RANKS, str(code), "/runs/x"]
    patch.setattr(hosted, "ranks_command", lambda *_, env: (command, env))
    graphfold.train([*corpus, "parallel.dp=2", "checkpoint=none"])


def test_ranks_tell_folder_and_reason(
    corpus: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(ConfigError, match=r"^key=1: is no 2$") as error:
        started_ranks(2, corpus, monkeypatch)
    assert (error.value.key, error.value.value, error.value.rule) == ("key", "1", "is no 2")
    with pytest.raises(graphfold.RunError, match=r"^exit code 75: key=1: is no 2$") as ended:
        started_ranks(75, corpus, monkeypatch)
    assert ended.value.folder == Path("/runs/x")
    said = capsys.readouterr()
    assert said.out == "step 1\n" * 2 and said.err.startswith("warning\ntrain.py: key=1")
    assert hosted._reason(["torchrun: rank 1 died", ""]) == "torchrun: rank 1 died"
    assert hosted._reason([]) == ""


@pytest.mark.full
def test_several_ranks_train(corpus: tuple[str, ...], tmp_path: Path):
    words = [*corpus, f"train.steps={STEPS}", *TWO]
    result = graphfold.train([*words, f"run_dir={tmp_path}/two"])
    assert result.metrics["step"].tolist() == [0, 1, 2, 3] and result.folder == tmp_path / "two"
    with pytest.raises(graphfold.RunError) as ended:
        stopped((*corpus, *TWO), tmp_path / "b", terminate)
    assert ended.value.code == 75 and "saved" in ended.value.message


def test_generate_equals_the_command(trained: graphfold.Result):
    options: TextOptions = {"max_new_tokens": 5, "temperature": 0.5, "top_k": 9, "seed": 3}
    with graphfold.load(trained.folder, ["train.device=cpu"]) as model:
        one = model.generate("def ", **options)
        assert model.generate(["def "], **options) == [one]
        assert model.generate("def ", stop=one[:1], **options) == ""
        code, out, _ = generated(
            trained.folder,
            "prompt=def ",
            "train.device=cpu",
            *(f"{name}={value}" for name, value in options.items()),
        )
        assert (code, out) == (0, f"def {one}\n")
        for wrong, said in (
            ({"temperature": "x"}, "temperature=x: must be a number"),
            ({"max_new_tokens": 1.5}, "max_new_tokens=1.5: must be a whole number"),
            ({"graph": "x"}, "graph=x: must be auto or none"),
        ):
            with pytest.raises(ConfigError, match=said):
                model.generate("def ", **wrong)
        with pytest.raises(ConfigError, match="prompt=: is empty"):
            model.generate("")
        with pytest.raises(TypeError, match="no option max_tokens"):
            model.generate("def ", max_tokens=3)
        with pytest.raises(TypeError, match="prompts are a text or several"):
            model.generate([b"def "])
    assert not dist.is_initialized() and repr(model).endswith("closed>")
    with pytest.raises(ValueError, match="closed> cannot be used any more"):
        model.generate("def ")


def test_options_are_those_of_the_commands():
    assert {*TextOptions.__annotations__} == {*OWN} - {"prompt", "file"}
    told = Words(Path(), (("prompt", "x"),), ())
    assert Request.of(told).count == 200 and Request.of(told).batch == 16


def test_evaluate_equals_the_command(trained: graphfold.Result, tmp_path: Path):
    text, questions = tmp_path / "it's.txt", tmp_path / "questions.jsonl"
    text.write_text("def plan(run):\n    return run\n" * 9)
    row = {"prompt": "def", "choices": [" a", " bcd"], "answer": 1}
    questions.write_text(json.dumps(row) + "\n")
    cache = f"data.cache_dir={tmp_path}/cache"
    with graphfold.load(trained.folder) as model:
        scores = model.evaluate(text, overrides=[cache])
        answers = model.evaluate(choices=questions, batch=1)
        with pytest.raises(ConfigError, match="a call scores either documents or questions"):
            model.evaluate()
        with pytest.raises(ConfigError, match="stride=32: must be below the context"):
            model.evaluate([text], stride=32, overrides=[cache])
    _, out, _ = evaluated(trained.folder, f"data.path={quoted(text)}")
    line = f"perplexity {scores['perplexity']:.4f}, {scores['loss']:.5f} nats per token, of "
    assert out.startswith(f"{line}{scores['tokens']:,} tokens; ")
    assert answers.keys() == {"accuracy", "normalised", "questions"} and answers["questions"] == 1


@pytest.mark.usefixtures("no_picture")
def test_models_outlive_runs_and_each_other(
    corpus: tuple[str, ...], trained: graphfold.Result, tmp_path: Path
):
    first = graphfold.load(trained.folder)
    text = first.generate("def ", max_new_tokens=4)
    exported = first.export(tmp_path / "model")
    second = graphfold.load(exported)
    assert second.generate("def ", max_new_tokens=4) == text
    first.close()
    graphfold.train([*corpus, "train.steps=1", f"run_dir={tmp_path}/run"])
    assert second.generate("def ", max_new_tokens=4) == text and torch.is_grad_enabled()
    with pytest.raises(ConfigError, match="is the folder of a Hugging Face model, not a run"):
        second.export(tmp_path / "again")
    assert dist.is_initialized()
    del second
    assert not dist.is_initialized()


def test_a_world_of_the_caller_stays():
    cpu = torch.device("cpu")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with process_world(0, 1, cpu), process_world(0, 1, cpu):
            dist.barrier()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(RuntimeError, match="connects this process with 1 others"):
            process_world(0, 1, cpu).__enter__()
    finally:
        dist.destroy_process_group()


def test_load_refuses_what_it_cannot_use(trained: graphfold.Result, tmp_path: Path):
    with pytest.raises(ConfigError, match="world_size=2: a loaded model has one process"):
        graphfold.load(trained.folder, ["parallel.tp=2"])
    with pytest.raises(ConfigError, match="checkpoint="):
        graphfold.load(tmp_path)
    assert not dist.is_initialized()
