"""Names of keys of earlier versions: typed, in files of options, and saved by runs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from app.cli.options import old_names
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_overrides, load_typed, settings_line
from app.cli.options.explained import COMPOSING, explained
from app.cli.options.keys import all_keys
from app.cli.options.saved import saved_run
from app.cli.options.unknown import no_such_flag
from app.cli.run_report.facts import settings
from app.cli.run_report.sweep_record import Job
from app.config import Run, renamed
from app.config.renamed import CHANGED, Removed, Renamed, RenamedValue, with_new_names
from app.engine.files.checkpoints import (
    MANIFEST,
    manifest_digest,
    newest_checkpoint,
    parse_manifest,
)
from app.engine.files.run_folder import CONFIG, describe_run
from app.errors import ConfigError, typed
from app.planner.plan import Plan
from app.version import Version
from tests.integration.continued_settings import TINY
from tests.programs import run_forked
from tests.training import ROOT

STASH, BUFFER = "model.moe.static.stash", "model.moe.static.paged_buffer"
STATIC = ("model.moe.dispatcher=static", "cuda_graph=full_iteration", "train.device=cuda")
TOLD = f"old name: {STASH} is now {BUFFER}"


@pytest.fixture(autouse=True)
def told_anew() -> Iterator[None]:
    """Each line is told once in a process."""
    old_names._say.cache_clear()
    yield


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that no version has made yet."""
    more = (
        Renamed("train.total", "train.steps"),
        Renamed("train.budget", "optim.decay_steps"),
        RenamedValue("schedule.name", "one_f_one_b", "1f1b"),
        Removed("train.patience", "train.max_bad_steps counts", idle=0),
        Removed("model.shape", "models are round", idle="round", instead="model.name"),
    )
    monkeypatch.setattr(renamed, "CHANGED", (*CHANGED, *more))
    monkeypatch.setattr(old_names, "CHANGED", (*CHANGED, *more))


def loaded(*words: str) -> Run:
    return load_typed(Typed.parse(words))


def test_new_names_are_keys_and_old_ones_are_not():
    keys = set(all_keys())
    for change in CHANGED:
        if isinstance(change, Renamed):
            assert change.new in keys or "hardware.profile" in change.new
            assert change.old not in keys
        else:
            assert (change.key in keys) == isinstance(change, RenamedValue)


@pytest.mark.parametrize(
    ("word", "read"),
    [
        (f"{STASH}=1.5", f"{BUFFER}=1.5"),
        (f"+{STASH}=1.5", f"+{BUFFER}=1.5"),
        (f"++{STASH}=1.5", f"++{BUFFER}=1.5"),
        (f"~{STASH}", f"~{BUFFER}"),
        (f"{STASH}=1.5,2", f"{BUFFER}=1.5,2"),
        (f"{STASH}=choice(1.5,2)", f"{BUFFER}=choice(1.5,2)"),
        ("hardware.profile.product_tflops=9", "hardware.profile.gemm_tflops=9"),
        ("model=small", "model=small"),
        ("no key", "no key"),
    ],
)  # fmt: skip
def test_typed_override_has_the_present_name(word: str, read: str):
    assert Typed.parse([word]).overrides == (read,)


def test_old_name_is_told_once(capsys: pytest.CaptureFixture[str]):
    assert loaded(*STATIC, f"{STASH}=1.5").model.moe.static.paged_buffer == 1.5
    assert load_overrides([*STATIC, f"{STASH}=1.25"]).model.moe.static.paged_buffer == 1.25
    assert capsys.readouterr().err.splitlines() == [TOLD]


@pytest.mark.parametrize("rank", [{"RANK": "1"}, {"SLURM_PROCID": "2"}])
def test_old_name_is_told_by_one_rank(
    rank: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(old_names, "environment", lambda: rank)
    Typed.parse([f"{STASH}=1.5"])
    assert capsys.readouterr().err == ""


def test_both_names_are_refused():
    said = f"{STASH}=1: is {BUFFER} now, and that is given too; give {BUFFER} alone"
    for words in ([f"{STASH}=1", f"{BUFFER}=2"], [f"+{BUFFER}=2", f"{STASH}=1"]):
        with pytest.raises(ConfigError, match=re.escape(said)):
            Typed.parse(words)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.moe.static={stash: 1}", f"{STASH}=: is {BUFFER} now; did you mean {BUFFER}?"),
        ("optim={init_lr: 1}", "optim.init_lr=: was removed: warm-up begins at 0; "),
    ],
)
def test_old_name_inside_a_dictionary_is_explained(word: str, said: str):
    with pytest.raises(COMPOSING) as raised:
        loaded(word)
    assert str(explained(raised.value)).startswith(said)


def test_old_name_behind_dashes():
    assert str(no_such_flag([f"--{STASH}=1.5"])) == (
        f"option=--{STASH}=1.5: keys are typed without dashes, as key=value; "
        f"did you mean {BUFFER}=1.5?"
    )


def options(folder: Path, name: str, values: object, header: str = "") -> list[str]:
    """Write a file of options, and return the words with which it is looked for."""
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(header + yaml.safe_dump(values, sort_keys=False))
    return ["--config-dir", str(folder)]


def old_profile() -> dict[str, object]:
    """The option hardware=h200 as calibrate of before has written it."""
    option = yaml.safe_load((ROOT / "conf/hardware/h200.yaml").read_text())
    profile = option["profile"]
    profile["product_tflops"] = profile.pop("gemm_tflops")
    profile["product_memory"] = profile.pop("gemm_memory")
    return option


def test_profile_with_old_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = options(tmp_path, "hardware/mine", old_profile())
    found = loaded(*words, "hardware=mine").hardware
    assert found == load_overrides(["hardware=h200"]).hardware
    where = f" (in {tmp_path}/hardware/mine.yaml)"
    assert capsys.readouterr().err.splitlines() == [
        f"old name: hardware.profile.{old} is now hardware.profile.{new}{where}"
        for old, new in (("product_tflops", "gemm_tflops"), ("product_memory", "gemm_memory"))
    ]


def test_experiment_with_old_names(tmp_path: Path):
    values = {"model": {"moe": {"dispatcher": "static", "static": {"stash": 1.5}}},
              "optim": {"lr": 0.5}, "cuda_graph": {"impl": "full_iteration"}}  # fmt: skip
    words = options(tmp_path, "experiment/mine", values, "# @package _global_\n")
    found = loaded(*words, "+experiment=mine", "train.device=cuda")
    assert found.model.moe.static.paged_buffer == 1.5 and found.optim.lr == 0.5
    found = loaded(*words, "+experiment=mine", "train.device=cuda", f"{BUFFER}=2")
    assert found.model.moe.static.paged_buffer == 2.0, "what is typed counts"


def test_whole_configuration_with_old_names(tmp_path: Path):
    values = {"defaults": ["train", "_self_"], "model": {"moe": {"static": {"stash": 1.5}}},
              "optim": {"lr": 1.5}}  # fmt: skip
    words = options(tmp_path, "own", values)
    run = loaded(*words, "--config-name", "own", *STATIC)
    assert run.model.moe.static.paged_buffer == run.optim.lr == 1.5


def test_both_names_in_a_file_are_refused(tmp_path: Path):
    values = {"profile": {"product_tflops": 1, "gemm_tflops": 2}}
    words = options(tmp_path, "hardware/mine", values)
    with pytest.raises(ConfigError, match=rf"given too, in {tmp_path}/hardware/mine\.yaml; give"):
        loaded(*words, "hardware=mine")


def test_removed_key_says_what_to_do(changed: None, tmp_path: Path):
    for words in (
        ["train.patience=3"],
        [*options(tmp_path, "experiment/e", {"train": {"patience": 3}}, "# @package _global_\n"),
         "+experiment=e"],
    ):  # fmt: skip
        said = r"train\.patience=3: was removed: train\.max_bad_steps counts(, in .*)?$"
        with pytest.raises(ConfigError, match=said) as raised:
            loaded(*words)
        assert explained(raised.value) is raised.value


def test_removed_key_that_does_nothing_is_left_out(
    changed: None, capsys: pytest.CaptureFixture[str]
):
    assert Typed.parse(["train.patience=0", "~train.patience", "a=1"]).overrides == ("a=1",)
    assert with_new_names({"train": {"patience": 0}}, saved=False) == ({"train": {}}, [])
    assert "train.patience=0 does nothing" in capsys.readouterr().err


def test_removed_key_in_saved_settings(changed: None):
    present, (told,) = with_new_names({"train": {"patience": 3, "steps": 1}}, saved=True)
    assert present == {"train": {"steps": 1}} and "train.patience=3 is left out" in told
    for shape, keys in (("round", ()), ("flat", None), ("flat", ("model.name",))):
        values = {"model": {"shape": shape}}
        assert with_new_names(values, saved=True, typed_keys=keys)[0] == {"model": {}}
    said = "shape=flat: was removed: models are round; type model.name=…"
    with pytest.raises(ConfigError, match=said):
        with_new_names({"model": {"shape": "flat"}}, saved=True, typed_keys=())


REMOVED = [change for change in CHANGED if isinstance(change, Removed)]


@pytest.mark.every(12)
@pytest.mark.parametrize("change", REMOVED, ids=lambda change: change.key)
def test_every_removed_key_is_explained(change: Removed, tmp_path: Path):
    """Typed it ends in one line; saved by a run it is refused until the advice is followed, or
    left out; a checkpoint with it loads.
    """
    with pytest.raises(ConfigError) as raised:
        loaded(f"{change.key}=7")
    told = f"{change.key}=7: was removed: {change.now}"
    assert str(raised.value).startswith(told) and "\n" not in str(raised.value)
    if change.idle is not None:
        assert loaded(f"{change.key}={typed(change.idle)}") == loaded()

    folder = tmp_path / "a"
    folder.mkdir()
    describe_run(Plan(loaded("model=dense_tiny")), folder, Version.of())
    config = OmegaConf.load(folder / CONFIG)
    for value in (change.idle, 7):
        OmegaConf.update(config, change.key, value, force_add=True)
        (folder / CONFIG).write_text(OmegaConf.to_yaml(config))
        words = [f"resume={folder}"]
        if value == 7 and change.instead is not None:
            with pytest.raises(ConfigError, match=re.escape(f"; type {change.instead}=…")):
                loaded(*words)
            words.append(f"{change.instead}=1")
        assert loaded(*words).model.name == "dense_tiny"
        line = settings_line(Typed.parse(words))
        assert line is not None and (change.now in line) == (value == 7), line
        assert "lacks" not in line
    present, _ = with_new_names(OmegaConf.to_container(config), saved=True)
    assert present.keys() == config.keys(), "as of a checkpoint: nothing is refused"


def test_renamed_value(changed: None, tmp_path: Path):
    assert loaded("schedule.name=one_f_one_b", "parallel.pp=2").schedule.name.value == "1f1b"
    swept = Typed.parse(["schedule.name=gpipe,one_f_one_b", "a=one_f_one_b"]).overrides
    assert swept == ("schedule.name=gpipe,1f1b", "a=one_f_one_b")
    words = options(tmp_path, "schedule/mine", {"name": "one_f_one_b"})
    assert loaded(*words, "schedule=mine", "parallel.pp=2").schedule.name.value == "1f1b"


def test_key_that_moved_to_another_section(changed: None):
    assert Typed.parse(["train.budget=3"]).overrides == ("optim.decay_steps=3",)
    present, _ = with_new_names({"train": {"budget": 3}}, saved=False)
    assert present == {"train": {}, "optim": {"decay_steps": 3}}
    with pytest.raises(ConfigError, match=r"is optim\.decay_steps now; give it there"):
        with_new_names({"budget": 3}, "train", saved=False)


# What runs have saved.


def aged(folder: Path) -> None:
    """Give what a run has saved the names of an earlier version."""
    config = OmegaConf.to_container(OmegaConf.load(folder / CONFIG))
    (folder / CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create(_old(config))))
    checkpoint = newest_checkpoint(folder)
    if checkpoint is not None:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        manifest["config"] = _old(manifest["config"])
        manifest["sha256"] = manifest_digest(manifest)
        (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def _old(config: dict) -> dict:
    static = config["model"]["moe"]["static"]
    static["stash"] = static.pop("paged_buffer")
    if (profile := config["hardware"]["profile"]) is not None:
        profile["product_tflops"] = profile.pop("gemm_tflops")
        profile["product_memory"] = profile.pop("gemm_memory")
    return config


def test_settings_of_a_run_with_old_names(tmp_path: Path):
    folder = tmp_path / "a"
    folder.mkdir()
    run = load_overrides([*STATIC, f"{BUFFER}=1.5", "hardware=h200"])
    describe_run(Plan(run), folder, Version.of())
    aged(folder)
    found = loaded(f"resume={folder}")
    assert found.model == run.model and found.hardware == run.hardware
    line = settings_line(Typed((f"resume={folder}",)))
    assert line is not None and f"; {STASH} is now {BUFFER}; " in line
    assert "lacks" not in line
    assert settings(folder)[BUFFER] == 1.5 and STASH not in settings(folder)


def test_sweep_on_record_has_present_names():
    values = {"number": 0, "folder": "0", "overrides": [f"{STASH}=1"], "swept": [f"{STASH}=1"],
              "state": "done"}  # fmt: skip
    assert Job.from_json(values).overrides == Job.from_json(values).swept == (f"{BUFFER}=1",)


def program(folder: Path, *words: str) -> tuple[int, str, str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = run_forked(
        folder, [sys.executable, str(ROOT / words[0]), *words[1:]], env=env, tree=True
    )
    return done.returncode, done.stdout, done.stderr


MOE = ("model=moe_tiny", *(word for word in TINY if word != "model=dense_tiny"),
       "model.moe.num_experts=2", "model.moe.ffn_hidden_size=32", "hardware=h200")  # fmt: skip


def test_run_with_old_names_resumes(tmp_path: Path):
    """From its folder, and from its checkpoint alone; its model generates."""
    (tmp_path / "text.txt").write_text("\n".join(f"line {n} of a text" for n in range(900)))
    assert program(tmp_path, "train.py", *MOE, "train.steps=2", "run_dir=a")[0] == 0
    aged(tmp_path / "a")
    assert BUFFER.rpartition(".")[2] not in (tmp_path / "a" / CONFIG).read_text()
    checkpoint = newest_checkpoint(tmp_path / "a")
    assert checkpoint is not None
    assert "paged_buffer" in parse_manifest(checkpoint)["config"]["model"]["moe"]["static"]
    assert "stash" in parse_manifest(checkpoint, as_saved=True)["config"]["model"]["moe"]["static"]
    config = parse_manifest(checkpoint)["config"]
    assert saved_run(config, ["data.text_field=text"], None).model.moe.num_experts == 2

    branch = f"resume=a/checkpoints/{checkpoint.name}"
    code, said, wrong = program(tmp_path, "train.py", branch, "train.steps=3", "run_dir=b")
    assert (code, wrong) == (0, "")
    code, said, wrong = program(tmp_path, "train.py", "resume=a", "train.steps=4")
    assert (code, wrong) == (0, "")
    assert f"{STASH} is now {BUFFER}" in re.sub(r"\s+", " ", said)
    assert "train.steps: 2 -> 4" in said and "paged_buffer: " not in said
    assert "stash" not in (tmp_path / "a" / CONFIG).read_text()


@pytest.mark.full
def test_typed_old_name_reaches_every_rank(tmp_path: Path):
    """Told once, whether this program or a launcher starts the ranks."""
    (tmp_path / "text.txt").write_text("\n".join(f"line {n} of a text" for n in range(900)))
    options(tmp_path / "own", "hardware/mine", old_profile())
    words = (*MOE[:-1], "train.steps=1", f"{STASH}=null", "--config-dir", "own", "hardware=mine")
    code, _, wrong = program(tmp_path, "train.py", *words, "parallel.dp=2")
    profile = "old name: hardware.profile."
    assert code == 0
    assert wrong.count(TOLD) == 1 and wrong.count(profile) == 2 and wrong.count("\n") == 3, wrong


@pytest.mark.parametrize(("old", "new"), [("true", 0.0), ("True", 0.0), ("false", None)])
def test_scaled_embedding_is_a_number_now(old: str, new: float | None, tmp_path: Path):
    assert loaded(f"model.scale_embedding={old}").model.embedding_scale == new
    value = yaml.safe_load(old)
    words = options(tmp_path, "experiment/e", {"model": {"scale_embedding": value}},
                    "# @package _global_\n")  # fmt: skip
    assert loaded(*words, "+experiment=e").model.embedding_scale == new
    present, _ = with_new_names({"model": {"scale_embedding": value}}, saved=True)
    assert present == {"model": {"embedding_scale": new}}
