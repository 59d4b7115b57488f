"""Whole runs as a user starts them: what is written, resuming, being killed, several processes,
mistakes.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.engine.files.checkpoints import complete_checkpoints, newest_checkpoint
from app.engine.report.trackers import NAMES
from app.engine.step.records import RecoveryReport, RollbackReport, StepReport, ValidationReport
from app.version import Version
from tests.cases import chosen
from tests.programs import Forked, ForkedTree, run_forked
from tests.training import TIMED, wait_for
from tests.wandb_file import history, told

ROOT = Path(__file__).parent.parent.parent
TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.moe.ffn_hidden_size=32",
    "train.seq_len=32",
    "train.micro_batch=2",
    "train.global_batch=4",
    "train.eval_interval=4",
    "train.eval_sequences=8",
    "train.sample_tokens=8",
    "optim.warmup_steps=2",
    "log=console",
    "log.interval=2",
    "checkpoint.interval=4",
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small corpus, so that these runs prepare nothing large."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, file in enumerate(sorted((ROOT / "app/plan").rglob("*.py"))):
        (folder / f"{number}.txt").write_text(file.read_text())
    return f"data=text data.path=[{folder}/*.txt] data.cache_dir={folder}/cache"


def command(corpus: str, *overrides: str, processes: int = 1) -> list[str]:
    launcher = (
        []
        if processes == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    return [sys.executable, *launcher, str(ROOT / "train.py"), *corpus.split(), *TINY, *overrides]


def run(folder: Path, line: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A program in an interpreter of its own."""
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, **options)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> tuple[Path, str]:
    """Folder and output of an uninterrupted run of 12 steps, with a Weights & Biases run."""
    folder = tmp_path_factory.mktemp("whole")
    told = ("log.wandb=true", "log.verbose=true")
    done = run(folder, command(corpus, "train.steps=12", "run_dir=run", *told))
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


def test_run_folder(whole: tuple[Path, str]):
    folder, output = whole
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "loss.png",
        "ended.json",
        "wandb",
        "wandb_id",
        "checkpoints",
    }
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "hidden_size: 32" in (folder / "config.yaml").read_text()
    assert [path.name for path in complete_checkpoints(folder / "checkpoints")] == [
        "step-00000008",
        "step-00000012",
    ]
    for said in ("Sample", "this model", "bigram", "trigram", "loss.png", "step 12/12", "left"):
        assert said in output, said


def told_start(output: str) -> tuple[float, dict[str, float]]:
    """Seconds until a run was ready, and of each part."""
    told = re.search(r"^step \d+/12  ready after ([\d.]+) s: (.+)$", output, re.MULTILINE)
    parts = (part.rsplit(" ", 1) for part in told[2].split(", "))
    return float(told[1]), {name: float(seconds) for name, seconds in parts}


def test_a_start_is_told_by_part(whole: tuple[Path, str]):
    total, parts = told_start(whole[1])
    assert list(parts) == ["imports and plan", "device", "ranks", "choice of a checkpoint", "data",
                           "model", "run folder", "validation", "first step"]  # fmt: skip
    assert sum(parts.values()) == pytest.approx(total, abs=0.06)  # each is rounded
    assert parts["imports and plan"] > 0.3, "since the process began: torch is loaded by then"
    assert whole[1].count("ready after") == 1


def test_metrics_are_the_documented_ones(whole: tuple[Path, str]):
    """docs/metrics.md lists every key that a report may have, and a run writes all that apply on
    CPU and are not asked for.
    """
    page = (ROOT / "docs/metrics.md").read_text()
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    documented = {key for cell in cells for key in re.findall(r"\w+", cell)}
    reports = (StepReport, ValidationReport, RollbackReport, RecoveryReport)
    fields = {field for report in reports for field in report.__dataclass_fields__}
    assert documented == fields - {"by_source", "parts"}  # listed with their labels
    written = {key for row in metrics(whole[0]) for key in row}
    graphs = {key for key in documented if key.startswith("graph_")}
    clones = {"moe_rank_load_before", "moe_rank_load_after", "moe_clones"}
    in_8 = {key for key in documented if key.startswith("fp8_")}
    asked_for = {"moe_dropped", "reruns", "loss_scale", *clones, *graphs, *in_8}
    recovered = {key for key in documented if key.startswith("recovery_")}
    assert len(graphs) == 6 and len(recovered) == 9
    assert documented - written == {
        "mfu",
        "joules_per_token",
        "memory_reserved_gib",
        "launch_ms",
        "device_wait_ms",
        "gpu_clock",
        "gpu_others",
        "rollback_from",
        "rollbacks",
        *recovered,
        *asked_for,
    }


@pytest.mark.full
def test_metrics_that_are_asked_for(tmp_path: Path, corpus: str):
    asked = (
        "model.moe.capacity_factor=1",
        "precision.loss_scale=8",
        "log.interval=1",
        "log.verbose=true",
        "cuda_graph=partial",
        "precision.fp8.recipe=delayed",
        "precision.fp8.amax_history=1",
    )
    done = run_forked(tmp_path, command(corpus, "train.steps=6", "run_dir=run", *asked))
    assert done.returncode == 0, done.stderr
    line = (
        r"^step 4/6  (\d+) graphs \((\d+) planned\) captured in .* s; "
        r"MiB: static ([\d.]+), cut [\d.]+, pool [\d.]+, objects [\d.]+$"
    )
    told = re.search(line, done.stdout, re.MULTILINE)
    assert told[1] == told[2] != "0" and float(told[3]) > 0
    for row in metrics(tmp_path / "run"):
        if "loss" in row:
            assert (row["graph_count"] > 0) == (row["step"] > 3)
            assert row["loss_scale"] == 8 and 0 < row["moe_dropped"] < 1
            shares = [row.get(f"fp8_overflow_{kind}") for kind in ("inputs", "weights", "grads")]
            if row["step"] == 1:  # by scales of its own
                assert shares == [None] * 3
            else:
                assert all(0 <= share <= 1 for share in shares)
                assert (row["fp8_overflow_worst"] > 1) == any(shares)
    often = r"^Next time: [\d.]+% of the matrices in FP8, .* with precision.fp8.margin=1 twice"
    assert re.search(often, done.stdout, re.MULTILINE)


def test_wandb_run_reads_back(whole: tuple[Path, str]):
    rows = history(whole[0])
    expected = {
        row["step"]: row["loss"]
        for row in metrics(whole[0])
        if "loss" in row and row["step"] % 2 == 0
    }
    found = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert found == pytest.approx(expected)
    keys = {key for row in rows for key in row if not key.startswith("_")}
    assert {key for key in keys if not key.startswith("sample/")} <= {"step", *NAMES.values()}
    (tracker,) = told(whole[0], "run")
    assert (tracker.job_type, tracker.run_group) == ("train", "")
    assert list(tracker.tags) == ["layout=dp1", "schedule=none", "graphs=none"]
    config = {item.key: json.loads(item.value_json) for item in tracker.config.update}
    assert config["model"]["hidden_size"] == 32 and config["graphfold"] == Version.of().record()


def test_wandb_has_the_sample_and_the_plan(whole: tuple[Path, str]):
    folder, output = whole
    (files,) = (folder / "wandb").glob("offline-run-*/files")
    (row,) = (row for row in history(folder) if "sample/path" in row)
    page = html.unescape((files / row["sample/path"]).read_text())
    sample = re.search(r"▶\):\n(.*?)\n\nResult", output, re.DOTALL)[1]
    assert "▶" in sample and sample in page and row["step"] == 12
    assert {each.path for record in told(folder, "files") for each in record.files} >= {"plan.json"}
    assert (files / "plan.json").read_bytes() == (folder / "plan.json").read_bytes()
    assert not (files / "plan.json").is_symlink(), "the run folder may be moved before an upload"


@pytest.mark.full
def test_resumed_run_continues_its_wandb_run(whole: tuple[Path, str], tmp_path: Path, corpus: str):
    """By resume=auto and by its name; `wandb sync` makes one run of parts with one id."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder, symlinks=True)
    ids = [record.run_id for record in told(folder, "run")]
    for steps, resume in ((14, "auto"), (16, "run")):
        shutil.rmtree(folder / "wandb")
        where = f"train.steps={steps}", "run_dir=run", f"resume={resume}", "log.wandb=true"
        done = run(tmp_path, command(corpus, *where))
        assert done.returncode == 0 and not done.stderr, done.stderr
        ids += [record.run_id for record in told(folder, "run")]
        found = [(row["_step"], row["step"]) for row in history(folder)]
        # rows of trained step, validation and sample
        assert found == [(steps, steps), (steps + 1, steps), (steps + 2, steps)]
    assert len(ids) == 3 and len(set(ids)) == 1


def test_resume_is_exact(whole: tuple[Path, str], tmp_path: Path, corpus: str):
    """Stopped after 8 of 12 steps and continued: every number of the uninterrupted run, bit for
    bit.
    """
    first = run_forked(
        tmp_path, command(corpus, "train.steps=8", "optim.decay_steps=12", "run_dir=run")
    )
    more = ("train.steps=12", "run_dir=run", "resume=auto", "log.verbose=true")
    second = run_forked(tmp_path, command(corpus, *more))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "after step 8" in second.stdout
    assert "reading the checkpoint" in told_start(second.stdout)[1]
    assert untimed(metrics(tmp_path / "run"))[-5:] == untimed(metrics(whole[0]))[-5:]
    assert [row["step"] for row in metrics(tmp_path / "run")] == [
        row["step"] for row in metrics(whole[0])
    ]


@pytest.mark.full
def test_killed_while_training(whole: tuple[Path, str], tmp_path: Path, corpus: str):
    """kill -9 after the checkpoint of step 4; resume=auto of the same folder ends like the
    uninterrupted run.
    """
    process = Forked(command(corpus, "train.steps=12", "run_dir=run"), cwd=tmp_path)
    wait_for(lambda: newest_checkpoint(tmp_path / "run") is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = run_forked(tmp_path, command(corpus, "train.steps=12", "run_dir=run", "resume=auto"))
    assert done.returncode == 0, done.stderr
    assert untimed(metrics(tmp_path / "run")) == untimed(metrics(whole[0]))


@pytest.mark.full
def test_two_processes_with_shared_experts_resume_exactly(tmp_path: Path, corpus: str):
    overrides = ("parallel.ep=2", "train.steps=8", "optim.decay_steps=8")
    whole_run = run(tmp_path, command(corpus, *overrides, "run_dir=whole", processes=2))
    assert whole_run.returncode == 0, whole_run.stderr
    for steps, resume in ((4, "null"), (8, "part")):
        part = run(
            tmp_path,
            command(
                corpus,
                *overrides,
                f"train.steps={steps}",
                "run_dir=part",
                f"resume={resume}",
                processes=2,
            ),
        )
        assert part.returncode == 0, part.stderr
    assert untimed(metrics(tmp_path / "part"))[-5:] == untimed(metrics(tmp_path / "whole"))[-5:]


@pytest.mark.full
def test_the_layout_starts_its_processes(whole: tuple[Path, str], tmp_path: Path, corpus: str):
    line = command(corpus, "parallel.dp=2", "train.steps=12", "run_dir=run")
    done = run_forked(tmp_path, line, tree=True)
    assert done.returncode == 0, done.stderr
    losses = [
        [row["loss"] for row in metrics(folder) if "loss" in row]
        for folder in (tmp_path / "run", whole[0])
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


MISTAKES = [
    (["train.steps=abc"], "train.steps=abc: must be a whole number"),
    (["parallel.ep=3"], "parallel.ep=3: must divide model.moe.num_experts=8"),
    (["data.path=[nowhere/*.txt]"], "data.path=nowhere/*.txt: matches no file"),
    (
        ["model.vocab_size=200"],
        "model.vocab_size=200: data.tokenizer=bytes has 257 ids; nearest that works: 264",
    ),
    (["resume=nowhere"], "resume=nowhere: does not exist"),
    (["train.seq_len=100000000"], "train.seq_len=100000000: the training split has only"),
    (["parallel.dp=64", "train.global_batch=128"], "parallel.dp=64: this host has room for"),
    (["train.device=cuda"], "train.device=cuda: this host has no usable GPU"),
    (
        [f"run_dir={'x' * 300}", "resume=auto"],
        f"run_dir={'x' * 300}: cannot be used: File name too long",
    ),
    (["run_dir=/dev/null/run"], "run_dir=/dev/null/run: cannot be used: Not a directory"),
]


@pytest.mark.parametrize(
    ("overrides", "said"),
    chosen(MISTAKES, MISTAKES[:1] + MISTAKES[-1:]),
    ids=[said.split(":")[0] for _, said in MISTAKES],
)
def test_mistake_leaves_nothing_behind(
    tmp_path: Path, corpus: str, overrides: list[str], said: str
):
    done = run_forked(
        tmp_path, command(corpus, *overrides), env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"train.py: {said}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_mistake_is_found_before_ranks_start(tmp_path: Path, corpus: str):
    """The layout asks for two processes, but one is enough to see what is wrong."""
    done = run_forked(tmp_path, command(corpus, "parallel.dp=2", "data.path=[nowhere/*.txt]"))
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name", ("metrics.jsonl", "config.yaml", "plan.json", ".plan.json.tmp.json")
)
def test_a_folder_in_the_place_of_a_file_costs_a_line(tmp_path: Path, corpus: str, name: str):
    (tmp_path / "run" / name).mkdir(parents=True)
    line = command(corpus, "train.steps=4", "run_dir=run", "resume=auto")
    done = run_forked(tmp_path, line)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("train.py: run_dir=run: cannot be used: Is a directory")


@pytest.mark.full
def test_mistake_of_launched_ranks_is_told_once(tmp_path: Path, corpus: str):
    """torchrun adds a report of its own; ours is one line of rank 0."""
    done = run(tmp_path, command(corpus, "data.path=[nowhere/*.txt]", processes=2))
    assert done.returncode != 0 and done.stderr.count("matches no file") == 1
    assert 'train.py", line' not in done.stderr, "a rank of ours printed a stack trace"
    assert list(tmp_path.iterdir()) == []


ENDS = [
    ("starter", signal.SIGKILL, "steps"),
    ("launcher", signal.SIGKILL, "steps"),
    ("starter", signal.SIGKILL, "start"),
    ("starter", signal.SIGTERM, "steps"),
    ("starter", signal.SIGINT, "steps"),
    ("plain torchrun", signal.SIGKILL, "steps"),
]


FORKED = (*ENDS[0], ForkedTree)


@pytest.mark.parametrize(
    ("who", "number", "phase", "program"),
    chosen([FORKED, *((*end, subprocess.Popen) for end in ENDS)], [FORKED]),
)
def test_no_rank_outlives_its_starter(
    tmp_path: Path, corpus: str, who: str, number: signal.Signals, phase: str, program: type
):
    """Whoever of the processes above the ranks ends, and however; with a signal to it alone.

    One that asks them to stop has them save, wherever it comes from.
    """
    processes = 2 if who == "plain torchrun" else 1
    settings = ("parallel.dp=2", "train.steps=100000", "run_dir=run")
    line = command(corpus, *settings, processes=processes)
    with (tmp_path / "out").open("wb") as out, (tmp_path / "said").open("wb") as said:
        starter = program(line, cwd=tmp_path, stdout=out, stderr=said)
    if phase == "steps":
        wait_for(lambda: newest_checkpoint(tmp_path / "run") is not None)
    else:
        wait_for(lambda: len(list(descendants(starter.pid))) >= 3)
    below = list(descendants(starter.pid))
    os.kill(below[0] if who == "launcher" else starter.pid, number)
    code = starter.wait(timeout=300)
    assert len(below) >= (2 if processes == 2 else 3)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    codes = {"launcher": 128 + number, signal.SIGTERM: 75, signal.SIGINT: 130}
    assert code == codes.get(who, codes.get(number, -number))
    if number != signal.SIGKILL:
        named = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[number]
        newest = newest_checkpoint(tmp_path / "run")
        step, told = int(newest.name.removeprefix("step-")), (tmp_path / "said").read_text()
        stopped = f"train.py: stopped by {named} after step {step}, saved run/checkpoints/"
        # a busy computer's preparation of the data says how far it is
        assert told.splitlines()[-1].startswith(f"{stopped}{newest.name}; ")


def descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, directly or not."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from descendants(int(child))


def test_a_second_run_does_not_overwrite_the_first(whole: tuple[Path, str], corpus: str):
    done = run_forked(whole[0].parent, command(corpus, "run_dir=run"))
    assert (
        done.returncode == 2
        and "run_dir=run: holds another run; continue it with resume=auto" in done.stderr
    )


@pytest.mark.full
def test_continuing_with_other_data_is_refused(whole: tuple[Path, str], corpus: str):
    done = run_forked(
        whole[0].parent,
        command(corpus, "run_dir=run", "resume=auto", "train.seq_len=16", "train.steps=20"),
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "train.py: train.seq_len=16: the checkpoint run/checkpoints/step-00000012"
    )


@pytest.mark.full
@pytest.mark.parametrize("fresh", chosen([False, True], [False]), ids=["forked", "fresh"])
def test_local_script(tmp_path: Path, corpus: str, fresh: bool):
    """What it starts is started as fresh processes, or only told, and forked."""
    script, folder = ROOT / "scripts/train_local.sh", tmp_path / "checkout"
    more = command(corpus, f"run_dir={tmp_path}/run", "train.steps=4")[2:]
    if fresh and not (ROOT / ".venv").exists():
        pytest.skip("needs the environment that make creates")
    if not fresh:
        (folder / "scripts").mkdir(parents=True)
        (folder / ".venv/bin").mkdir(parents=True)
        script = Path(shutil.copy(script, folder / "scripts"))
        (folder / ".venv/bin/python").write_text("#!/bin/sh\npwd\nprintf '%s\\n' \"$@\"\n")
        (folder / ".venv/bin/python").chmod(0o755)
    done = run(tmp_path, [str(script), "-n", "1", *more])
    if not fresh:
        place, *line = done.stdout.splitlines()
        assert place == str(folder)
        done = run_forked(ROOT, [sys.executable, *line], tree=True)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4, 4]
    assert "scripts/train_local.sh" in run(tmp_path, [str(script), "-h"]).stdout


@pytest.mark.full
def test_the_default_run_learns(tmp_path: Path):
    """What `make train` starts: below 1.7 nats per byte, and below what counting n-grams
    reaches.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "run_dir=run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    model, bigram, trigram = (
        float(re.search(rf"{name} +([0-9.]+)", done.stdout)[1])
        for name in ("this model", "bigram", "trigram")
    )
    assert model < 1.7 and model < trigram < bigram
    loads = [row["moe_load_worst"] for row in metrics(tmp_path / "run") if "moe_load_worst" in row]
    assert max(loads[len(loads) // 2 :]) < 3
