"""Searches of Optuna: refused before the first trial, a folder each, one line per trial."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict

from app.cli.options.arguments import OUR_SEARCH, with_our_search, with_sweep_folder
from app.cli.options.compose import register_schema
from app.cli.options.messages import readable_errors
from app.cli.processes.launcher import Launch
from app.cli.run_report.sweep_record import Sweep
from app.cli.start.launch import mistakes_in_one_line
from app.cli.sweeps import jobs, search
from app.cli.sweeps.jobs import Returned, SideBySide
from app.cli.sweeps.search import check_search, searching
from app.errors import ConfigError, JobFailedError
from tests.config import CONF
from tests.integration.test_hydra_use import SMALL, own, program  # noqa: F401 - a fixture

LR = "optim.lr=tag(log,interval(3e-4,1e-2))"
ASKED = {"n_trials": 3, "n_jobs": 1, "max_failure_rate": 0.0, "storage": None, "study_name": None,
         "params": None, "search_space": None, "custom_search_space": None}  # fmt: skip


@pytest.fixture(scope="module")
def composed() -> Iterator[DictConfig]:
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield compose("train", ["model=dense_tiny"], return_hydra_config=True)


def check(composed: DictConfig, folder: Path, *words: str, **options: Any) -> None:
    config = composed.copy()
    OmegaConf.set_readonly(config.hydra, False)
    with open_dict(config.hydra):
        config.hydra.sweeper = ASKED | options
        config.hydra.overrides.task = ["model=dense_tiny", *words]
        config.hydra.sweep.dir = str(folder)
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    check_search(config, hydra.config_loader)


REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "hydra.sweeper.n_trials=0: must be at least 1": ((LR,), {"n_trials": 0}),
    "hydra.sweeper.n_jobs=-1: must be at least 1": ((LR,), {"n_jobs": -1}),
    "hydra.sweeper.max_failure_rate=2.0: must be from 0 to 1": ((LR,), {"max_failure_rate": 2.0}),
    "hydra/sweeper=optuna: has nothing to search, as no key has several values; "
    f"type '{LR}' or the like": (("optim.lr=1e-3",), {}),
    "train.step=3: there is no such key; did you mean train.steps?": ((LR, "train.step=3"), {}),
    "optim.learning_rate=interval(1,2): is optim.lr here; did you mean optim.lr=interval(1,2)?": (
        ("optim.learning_rate=interval(1,2)",),
        {},
    ),
    "train.step=range(2,5): there is no such key; did you mean train.steps=range(2,5)?": (
        (LR,),
        {"params": {"train.step": "range(2,5)"}},
    ),
    "train.steps=-3: must be at least 1; nearest that works: 1": ((LR, "train.steps=-3"), {}),
    "optim.lr=-1.0: must be above 0; nearest that works: 0.003": (
        ("optim.lr=interval(-1.0,1e-2)",),
        {},
    ),
    "train.steps=0: must be at least 1; nearest that works: 1": (
        ("train.steps=int(interval(0,9))",),
        {},
    ),
    "optim.lr=tag(log,interval(0,1e-2)): log needs ends above 0; raise the first": (
        ("optim.lr=tag(log,interval(0,1e-2))",),
        {},
    ),
    "optim.lr=interval(1,0): begins above its end; exchange the two": (
        ("optim.lr=interval(1,0)",),
        {},
    ),
    "run_dir=x: each job of a sweep has a folder of its own; give hydra.sweep.dir=…": (
        (LR, "run_dir=x"),
        {},
    ),
    "recompute=glob(*): is for hydra/sweeper=grid; list the values like recompute=1,2,3": (
        ("recompute=glob(*)",),
        {},
    ),
}  # fmt: skip
TOLD = list(REFUSED)


@pytest.mark.parametrize(
    "told",
    [*TOLD[:6], *(pytest.param(each, marks=pytest.mark.full) for each in TOLD[6:])],
)
def test_search_that_cannot_begin_is_refused(told: str, composed: DictConfig, tmp_path: Path):
    words, options = REFUSED[told]
    with pytest.raises(ConfigError) as refused:
        check(composed, tmp_path / "s", *words, **options)
    assert str(refused.value) == told


@pytest.mark.parametrize(
    "words",
    [
        ("optim.lr=interval(0,1e-2)",),  # 0 is hardly ever drawn
        ("model=moe_tiny", "model.moe.top_k=int(interval(1,9))", "model.moe.num_experts=8,16"),
    ],
)
def test_search_whose_end_works_with_other_values_begins(
    words: tuple[str, ...], composed: DictConfig, tmp_path: Path
):
    check(composed, tmp_path / "s", *words)


@pytest.mark.full
def test_search_with_one_end_that_works_begins(composed: DictConfig, tmp_path: Path):
    check(composed, tmp_path / "s", "optim.lr=interval(1e-9,1e-2)", "optim.min_lr=1e-4")
    with pytest.raises(ConfigError, match=r"^optim.min_lr=0.0001: above the peak optim.lr=1e-09"):
        check(composed, tmp_path / "s", "optim.lr=interval(1e-9,1e-8)", "optim.min_lr=1e-4")


def test_only_a_stored_study_continues_in_its_folder(
    composed: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    Sweep(tmp_path, "c", "now", jobs=()).save()
    with pytest.raises(ConfigError, match=": contains another search; choose a new folder; "):
        check(composed, tmp_path, LR)
    stored = {"storage": "sqlite:///s.db", "study_name": "s"}
    with pytest.raises(ConfigError, match=": contains another search; choose a new folder; "):
        check(composed, tmp_path, LR, **stored | {"study_name": None})
    monkeypatch.setattr(search, "version", lambda name: "2.1.9")
    with pytest.raises(ConfigError, match=r"^hydra.sweeper.storage=sqlite:///s.db: Optuna 2 store"):
        check(composed, tmp_path, LR, **stored)
    (tmp_path / "sweep.json").rename(tmp_path / "other")
    with pytest.raises(ConfigError, match=r": has files but no sweep; choose a new folder$"):
        check(composed, tmp_path, LR, **stored)


def test_each_start_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    words = ["-m", "hydra/sweeper=optuna", LR]
    first = with_sweep_folder(words)[-1]
    Path(first.partition("=")[2]).mkdir(parents=True)
    assert with_sweep_folder(words)[-1] == f"{first}-2"
    stored = [*words, "hydra.sweeper.storage=sqlite:///s.db", "hydra.sweeper.study_name=s"]
    again = with_sweep_folder(stored)[-1]
    Path(again.partition("=")[2]).mkdir(parents=True)
    assert with_sweep_folder(stored)[-1] == again != first
    assert with_our_search(words) == [*words, OUR_SEARCH]
    assert with_our_search(words[1:]) == words[1:] and with_our_search(["-m"]) == ["-m"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-m",), "the same command resumes"),
        (
            ("-m", "hydra/sweeper=optuna", "hydra.sweeper.storage=null"),
            "hydra/sweeper=optuna does not resume: start again, in a new folder",
        ),
        (
            ("-m", "hydra/sweeper=optuna", "hydra.sweeper.storage=a", "hydra.sweeper.study_name=b"),
            "the same command adds trials to those stored",
        ),
    ],
)
def test_interrupted_sweep_tells_what_its_command_does(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit), mistakes_in_one_line(Launch(0, 0, None), words):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == f"\ntrain.py: stopped; {told}\n"


def test_trials_count_up_to_those_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    titles = list[str]()

    def run(self: SideBySide, overrides: list[list[str]]) -> list[Returned]:
        sweep = Sweep.load(tmp_path)
        assert sweep is not None
        titles.extend(sweep.title(sweep.job_of(each), self.of) for each in overrides)
        return []

    monkeypatch.setattr(SideBySide, "run", run)
    log = OmegaConf.create({"group": None})
    typed: Any = OmegaConf.create({"words": []})
    for start, each in enumerate(([["a=1"], ["a=2"]], [["a=3"]])):
        jobs.run_trials("x", tmp_path, each, typed=typed, fixed=(), log=log, more=3 - 2 * start)
    assert [title.split()[0] for title in titles] == ["[1/3]", "[2/3]", "[3/3]"]


def test_failed_trial_costs_no_second_line(capfd: pytest.CaptureFixture[str]):
    failed = Returned(["a=1"], status=JobStatus.FAILED)
    with pytest.raises(JobFailedError):
        print(failed.return_value)
    for error, said in (
        (JobFailedError(), "hydra.sweeper.max_failure_rate=0.5 allows no more failures"),
        (ValueError("No trials are completed yet."), "no trial has a validation loss"),
    ):
        with pytest.raises(SystemExit) as ended, searching(0.5):
            raise error
        assert ended.value.code == 1
        assert capfd.readouterr() == ("", f"train.py: the search ends: {said}\n")
    with pytest.raises(SystemExit) as ended, readable_errors("train", speak=True):
        raise JobFailedError  # of a sweeper of Hydra's own
    assert ended.value.code == 1 and capfd.readouterr() == ("", "")


@pytest.mark.full
def test_optuna_counts_its_trials_and_ends_at_a_failure(own: Path):  # noqa: F811
    pytest.importorskip("optuna", reason="optuna is not installed; make test-all installs it")
    words = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "--config-dir", "own",
             "+experiment=mine", *SMALL, "data=text", LR)  # fmt: skip
    data = ("data.path=text.txt", f"data.cache_dir={own}/cache", "hydra.sweeper.n_jobs=2")
    for start in ("", "-2"):
        done = program(own, *words, *data, "sweep.jobs_at_once=2")
        assert done.returncode == 0, done.stderr
        assert sorted(re.findall(r"\[(\d/2)\].* done in", done.stdout)) == ["1/2", "2/2"]
        assert list(own.glob(f"sweeps/optuna-????????{start}/optimization_results.yaml"))
    failed = program(own, *words, "data.path=none", "hydra.sweeper.n_jobs=1")
    assert failed.returncode == 1, failed.stderr
    assert re.search(r"\[1/2\].*failed after .*: data.path=none: matches no file\n$", failed.stdout)
    (said,) = [line for line in failed.stderr.splitlines() if "A new study" not in line]
    assert said.endswith(
        "the search ends: hydra.sweeper.max_failure_rate=0 allows no more failures"
    )
    (own / "file").touch()
    refused = program(own, *words, *data, "hydra.sweep.dir=file/below")
    assert (refused.returncode, refused.stderr) == (
        2,
        "train.py: hydra.sweep.dir=file/below: cannot be used: Not a directory; choose another\n",
    )
