"""`app.cli.tune`: measured combinations, the record that continues, and the experiment written."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from app.advice.combinations import plan_combinations, planned
from app.advice.trials import Trials
from app.cli import tune
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.tuning import worker
from app.cli.tuning.measuring import Bench
from app.cli.tuning.records import RECORD, Measurement, State, read_record
from app.cli.tuning.written import experiment_text
from app.errors import ConfigError
from app.version import Version
from tests.config import load

TINY = ("model=dense_tiny", "train.device=cpu", "train.seq_len=16", "train.global_batch=4")
TINY += ("train.micro_batch=2", "log=none", "data.tokenizer=bytes")


def test_worker_records_times_refusals_and_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    build = worker.build_engine

    def lacking(plan, *args):
        if plan.run.train.micro_batch == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")
        if plan.run.train.micro_batch == 1:
            raise RuntimeError("broken")
        return build(plan, *args)

    monkeypatch.setattr(worker, "build_engine", lacking)
    rows = {"as typed": [], "four": ["train.micro_batch=4"], "three": ["train.micro_batch=3"]}
    rows |= {"one": ["train.micro_batch=1"]}
    task, record = tmp_path / "task.json", tmp_path / RECORD
    listed = [{"key": key, "overrides": words} for key, words in rows.items()]
    task.write_text(
        json.dumps({"record": str(record), "words": TINY, "steps": 3, "combinations": listed})
    )
    read_record(record, TINY)
    assert worker.main([str(task)], os.getppid()) == 0
    found = read_record(record, TINY)
    assert {key: each.state for key, each in found.items()} == {
        "as typed": State.measured,
        "four": State.no_memory,
        "three": State.refused,
        "one": State.failed,
    }
    own = found["as typed"]
    assert len(own.steps_ms) == 3 and own.step_ms == sorted(own.steps_ms)[1] > 0
    assert found["four"].reason == "CUDA out of memory. Tried"
    assert "train.micro_batch" in str(found["three"].reason)
    assert found["one"].reason == "RuntimeError: broken"


def test_record_continues_behind_a_cut_line(tmp_path: Path):
    record = tmp_path / RECORD
    assert read_record(record, ["a"]) == {}
    first = Measurement("x", State.measured, step_ms=2.0, steps_ms=(1.0, 2.0, 3.0))
    first.append(record)
    Measurement("y", State.failed, "another rank ended").append(record)
    Measurement("y", State.no_memory, "of this one").append(record)
    whole = record.read_text()
    record.write_text(whole + first.line()[:20])
    found = read_record(record, ["a"])
    assert found["x"] == first and found["y"].state is State.no_memory and len(found) == 2
    assert record.read_text() == whole


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"of": ["b"]}\n', "holds measurements of b"), ('{"of": ["a"]}\n[]\n', "line 2 is no JSON")],
    ids=["other run", "no object"],
)
def test_record_of_something_else_is_refused(tmp_path: Path, text: str, said: str):
    record = tmp_path / RECORD
    record.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_record(record, ["a"])


def test_experiment_gives_the_chosen_run(tmp_path: Path):
    typed = Typed(("+experiment=small", "hardware=h200", "parallel.world_size=4", "optim.lr=1e-3"))
    run, trials = load_typed(typed), Trials(2**40)
    moved = ("parallel.pp=2", "'parallel.layout=Et*13|t*11L'", "train.micro_batch=1")
    other = load(*typed.overrides, *(word.strip("'") for word in moved))
    combinations = [planned(run, run, trials), planned(other, run, trials)]
    own, chosen = combinations
    times = {own.key: 110.0, chosen.key: 100.0}
    text = experiment_text(chosen, combinations, times, typed=typed, about=["found"])
    assert "micro_batch: 1 # measured: +10.0% time with the typed value" in text
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "tuned.yaml").write_text(text)
    assert load_typed(Typed(("+experiment=tuned",), config_dir=str(tmp_path))) == other
    text = experiment_text(chosen, combinations, {}, typed=typed, about=[])
    more = own.seconds / chosen.seconds - 1
    assert f"micro_batch: 1 # planned: {more:+.1%} time with the typed value" in text
    unfit = [replace(own, fits=False), chosen]
    assert "does not fit" in experiment_text(chosen, unfit, {}, typed=typed, about=[])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("budget=10", "budget=10: must be a time"),
        ("fp8=maybe", "yes or no"),
        ("name=a/b", "letters"),
    ],
)
def test_mistakes_in_own_options_are_refused(word: str, said: str):
    with pytest.raises(ConfigError, match=said):
        tune.parse([word])


def test_plan_without_measurements_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tune, "plan_combinations", partial(plan_combinations, most=30))
    words = [*TINY, "parallel.world_size=64", "train.global_batch=128", f"out={tmp_path}"]
    assert tune.main([*words, "budget=0"]) == 0
    said = capsys.readouterr().out
    assert "nothing is measured" in said and (tmp_path / "front.png").stat().st_size > 1000
    load_typed(Typed(("+experiment=tuned",), config_dir=str(tmp_path)))
    record = tmp_path / RECORD
    assert not record.exists()  # it would be of this host, and another one may measure
    typed = tune.parse(words).typed
    read_record(record, (*sorted(typed.words), "CPU", Version.of().short))
    run = load_typed(typed)
    key = planned(run, run, Trials(1 << 50)).key
    Measurement(key, State.measured, step_ms=7.0, steps_ms=(7.0,)).append(record)
    for head, taken in (None, True), ("of another program", False):
        if head is not None:
            text = record.read_text().splitlines()
            record.write_text("\n".join([json.dumps({"of": [head]}), *text[1:], ""]))
        assert tune.main([*words, "budget=0"]) == 0
        said = capsys.readouterr().out
        assert (
            ("taken over: 1 measurement of" in said) is taken is not ("is not taken over" in said)
        )
        found = (tmp_path / "experiment/tuned.yaml").read_text()
        assert ("measured 7.0 ms per step" in found) is taken


@pytest.mark.full
def test_search_on_two_ranks_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = [*TINY, "parallel.world_size=2", f"out={tmp_path}", "budget=20s"]
    assert tune.main(words) == 0
    first = (tmp_path / RECORD).read_text().splitlines()
    assert len(first) > 3 and "written: " in capsys.readouterr().out
    assert tune.main(words) == 0
    assert "taken over: " in capsys.readouterr().out
    again = (tmp_path / RECORD).read_text().splitlines()
    assert again[: len(first)] == first


@pytest.mark.full
def test_ranks_that_die_or_hang_are_recorded(tmp_path: Path):
    typed = Typed((*TINY, "parallel.world_size=2"))
    run, trials = load_typed(typed), Trials(2**40)
    own = planned(run, run, trials)
    bad = replace(own, overrides=("train.seq_len=-1",))
    bench = Bench(typed, 2, tmp_path, tmp_path / RECORD, ("it",), steps=2)
    told: list[Measurement] = []
    bench.measure([bad, own], told.append)
    assert [each.state for each in told] == [State.refused, State.measured]
    late = replace(own, overrides=("train.seed=2",))
    bench.measure([late], told.append, most_s=0.5)
    assert told[-1].state is State.timed_out and told[-1].key == "train.seed=2"
