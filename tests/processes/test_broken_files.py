"""Files of run and sweep folders are changed at random: readers refuse them in one line."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.choices import Source
from app.cli import explain, report
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.options.continued import RunSettings
from app.cli.options.messages import mistakes_raised
from app.cli.plan_views.explained import print_explained
from app.cli.run_report.page import page
from app.cli.run_report.sweep_record import RECORD, Job, Sweep
from app.cli.run_report.table import read_report
from app.cli.sweeps.job_lines import progress
from app.cli.sweeps.jobs import closing
from app.config import DataConfig
from app.data.chat_template import ChatTemplate
from app.data.feed import Cursor, TrainFeed
from app.data.load import load_data
from app.data.tokenizer import bytes_as_json, load_tokenizer
from app.engine.decoding.model_tokens import generation_ends, prefix_token
from app.engine.export.texts import read_texts
from app.engine.files.manifest import check_cursor
from app.engine.files.run_folder import begin_metrics, read_metrics
from app.engine.files.trace_sums import read_trace, write_sums
from app.engine.start.kept_tokenizer import changed_end
from app.errors import ConfigError
from app.planner.explain import explain as causes
from app.planner.measured import Measurements, TraceSums
from app.planner.plan import Plan
from tests.cases import chosen
from tests.processes.resume import RUN, saved
from tests.processes.test_random_manifests import BAD, mutated

WORSE = (*BAD, float("nan"), float("inf"), 1e90, 1e308, "a\nb", "${oc.env:HOME}", 0)
SEEDS = range(100)
CHANGES = 6  # of a seed
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
ROW = {"loss": 2.5, "tokens": 64, "tokens_per_s": 1e3, "step_ms": 9.5, "memory_peak_gib": 1.5}
TEXTS = {
    "tokenizer.json": bytes_as_json(),
    "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}),
    "generation_config.json": json.dumps({"eos_token_id": [256, 3], "bos_token_id": 256}),
    "chat_template.jinja": TEMPLATE,
}


def write_folder(folder: Path) -> None:
    """A sweep of two runs, the files of the first with all that readers look for."""
    for name in "ab":
        saved(folder / name, step=4)
        rows = [{"step": n, **ROW} for n in range(1, 30)] + [{"step": 29, "val_loss": 2.0}]
        (folder / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "a/profile").mkdir()
    write_sums(folder / "a", TraceSums(2, 4, {"GEMMs": 1.5}, compute_ms=3.0))
    for name, text in TEXTS.items():
        (folder / "a" / name).write_text(text)
    jobs = [Job(n, name, (f"x={n}",), swept=(f"x={n}",)) for n, name in enumerate("ab")]
    Sweep(folder, "train.py -m x=0,1", "2026-01-01T00:00:00", tuple(jobs)).save()


def read_sweep(folder: Path) -> None:
    """What `report`, and a sweep that resumes, read."""
    found = read_report(folder)
    report.print_table(found, io.StringIO())
    report.as_csv(found), page(found), progress(folder / "a")
    RunSettings.of(Typed.parse([f"resume={folder / 'a'}"]))
    if (sweep := Sweep.load(folder)) is not None:
        _ = [closing(job, folder / job.folder) for job in sweep.jobs]


def read_run(folder: Path) -> None:
    """What `plan explain` reads, and a run that resumes."""
    run_dir, plan = folder / "a", Plan(RUN)
    trace, (facts, then) = read_trace(run_dir), explain.read_plan(run_dir)
    if (found := Measurements.of(read_metrics(run_dir), plan.run, trace)) is not None:
        told, notes = causes(plan, found, facts, trace), [*explain.plan_notes(plan, facts, then)]
        print_explained(told, found, notes, trace=trace, stream=io.StringIO())
    begin_metrics(run_dir, 4)


def read_settings(folder: Path) -> None:
    with mistakes_raised():
        load_typed(Typed.parse([f"resume={folder / 'a'}", "train.steps=40"]))


def read_tokenizer(folder: Path) -> None:
    """What `generate`, `chat`, `evaluate` and exports read of it."""
    run_dir = folder / "a"
    tokenizer = load_tokenizer(str(run_dir))
    tokenizer.decode(tokenizer.encode("Wörter"))
    generation_ends(run_dir, tokenizer), prefix_token(run_dir, tokenizer), read_texts(run_dir, "x")
    changed_end({"data": {"end_of_document": "<|endoftext|>"}}, str(run_dir))
    if (template := ChatTemplate.find(run_dir)) is not None:
        template.text([{"role": "user", "content": "hello"}])


READERS: dict[Callable[[Path], None], tuple[str, ...]] = {
    read_sweep: (RECORD, "a/config.yaml", "a/plan.json", "a/metrics.jsonl", "a/checkpoints/latest"),
    read_run: ("a/plan.json", "a/metrics.jsonl", "a/profile/sums.json"),
    read_settings: ("a/config.yaml",),
    read_tokenizer: tuple(f"a/{name}" for name in TEXTS),
}


def changed(name: str, content: bytes, draw: random.Random) -> bytes:
    """Return the file with a field changed, or bytes cut, doubled, nested or overwritten."""
    lines = content.splitlines(keepends=True)
    if draw.random() < 0.6 and not name.endswith(("latest", ".jinja")):
        if name.endswith(".yaml"):
            return yaml.dump(mutated(yaml.safe_load(content), draw, WORSE)[0]).encode()
        if name.endswith(".jsonl"):
            place = draw.randrange(len(lines))
            row = mutated(json.loads(lines[place]), draw, WORSE)[0]
            lines[place] = json.dumps(row).encode() + b"\n"
            return b"".join([*lines, lines[draw.randrange(len(lines))]])
        return json.dumps(mutated(json.loads(content), draw, WORSE)[0]).encode()
    first, last = (draw.randrange(len(content) + 1) for _ in range(2))
    between = draw.choice((b"", b"[" * 100_000, b"\xff\xfe\x00", b"1" * 5000, content, b"\n- *x"))
    return content[:first] + between + content[last:]


@contextmanager
def in_one_line(said: str, seconds: int = 60) -> Iterator[None]:
    """Allow a ConfigError of one line, and nothing that waits forever."""

    def stuck(number: int, frame: object) -> None:
        raise TimeoutError(said)

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(seconds)
    try:
        yield
    except ConfigError as error:
        assert "\n" not in str(error), said
    except Exception as error:
        error.add_note(said)
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("seed", chosen(SEEDS, [0]))
@pytest.mark.parametrize("read", READERS)
def test_changed_files_cost_a_line(read: Callable[[Path], None], seed: int, tmp_path: Path):
    draw = random.Random(seed)
    write_folder(tmp_path / "s")
    for number in range(CHANGES if read is not read_settings else 1):
        folder = shutil.copytree(tmp_path / "s", tmp_path / str(number))
        name = draw.choice(READERS[read])
        content = changed(name, (folder / name).read_bytes(), draw)
        (folder / name).write_bytes(content)
        with in_one_line(f"change {number}: {name} is {content[:2000]!r}"):
            read(folder)


@pytest.mark.parametrize("read", [each for each in READERS if each is not read_settings])
def test_folders_and_pipes_in_place_of_files_cost_a_line(
    read: Callable[[Path], None], tmp_path: Path
):
    write_folder(tmp_path / "s")
    for make in (os.mkdir, os.mkfifo):
        for name in READERS[read]:
            folder = shutil.copytree(tmp_path / "s", tmp_path / f"{make.__name__}-{name}/s")
            (folder / name).unlink()
            make(folder / name)
            with in_one_line(f"{make.__name__} {name}"):
                read(folder)


FAULTS = {
    RECORD: ("{}", "must be complete, and has no folder"),
    "a/config.yaml": ("a: &x [1]\nb: *x", "has an alias, *x"),
    "a/profile/sums.json": ('{"first": "1", "last": 2}', 'first="1" must be a whole number'),
}


def test_a_broken_file_is_named(tmp_path: Path):
    write_folder(tmp_path / "s")
    text = (tmp_path / "s" / RECORD).read_text()
    outside = (text.replace('"b"', f'"{name}"') for name in ("/tmp", "..", "a/b", ""))
    rule = "jobs[1].folder="
    for name, (content, said) in [*FAULTS.items(), *((RECORD, (each, rule)) for each in outside)]:
        before = (tmp_path / "s" / name).read_bytes()
        (tmp_path / "s" / name).write_text(content)
        with pytest.raises(ConfigError) as error:
            read_sweep(tmp_path / "s"), read_run(tmp_path / "s")
        assert f"file={tmp_path / 's' / name}: cannot be read: {said}" in str(error.value)
        (tmp_path / "s" / name).write_bytes(before)


@pytest.mark.parametrize("seed", chosen(SEEDS, [0]))
def test_changed_positions_in_streams_cost_a_line(seed: int, tmp_path: Path):
    draw = random.Random(seed)
    (tmp_path / "stream").mkdir()
    for part in range(3):
        rows = [json.dumps({"text": f"{part}.{n}" + "x" * (n * 5 % 17)}) for n in range(9)]
        (tmp_path / f"stream/{part}.jsonl").write_text("\n".join(rows))
    name, cache = str(tmp_path / "stream"), str(tmp_path / "cache")
    config = DataConfig(
        source=Source.hub, name=name, streaming=True, cache_dir=cache, validation_documents=2
    )
    data, _ = load_data(config, 11, 1, tokenizer=load_tokenizer("bytes"))

    def feed(cursor: Cursor) -> TrainFeed:
        return TrainFeed(data, 0, 1, micro_batch=2, num_microbatches=1, cursor=cursor)

    begun = feed(Cursor())
    for _ in range(9):
        begun.next_step()
    state: Any = json.loads(json.dumps(begun.cursor.state()))
    for number in range(4 * CHANGES):
        other, what = mutated(state, draw, WORSE)
        with in_one_line(f"change {number}: {what}"):
            try:
                check_cursor(other)
            except ValueError:
                continue
            streams = Cursor.is_of_streams(other)
            feed(Cursor.merged([other]) if streams else Cursor.from_state(other)).next_step()
