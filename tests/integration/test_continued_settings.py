"""A run that continues has the settings that it has saved, but for what is typed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_overrides, load_typed, settings_line
from app.cli.options.continued import RunSettings
from app.config import Run
from app.engine.files.run_folder import CONFIG, describe_run
from app.planner.plan import Plan
from app.shell import shell_word
from app.version import Version
from tests.cases import chosen
from tests.integration.continued_settings import TINY
from tests.programs import run_forked

ROOT = Path(__file__).parent.parent.parent


def described(folder: Path, *overrides: str, world_size: int | None = None) -> Run:
    """Write what a run of these overrides saves of its settings."""
    folder.mkdir(parents=True)
    plan = planned(overrides, world_size)
    describe_run(plan, folder, Version.of())
    return plan.run


@cache
def planned(overrides: tuple[str, ...], world_size: int | None) -> Plan:
    return Plan(load_overrides(overrides, world_size))


def continued(*words: str, world_size: int | None = None) -> Run:
    return load_typed(Typed.parse(words), world_size)


def edited(folder: Path, **values: object) -> None:
    """Change keys of a saved configuration, as an earlier version would have written them."""
    config = OmegaConf.load(folder / CONFIG)
    for key, value in values.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    (folder / CONFIG).write_text(OmegaConf.to_yaml(config))


@pytest.mark.full
def test_saved_settings_count_where_nothing_is_typed(tmp_path: Path):
    run = described(tmp_path / "a", *TINY, "train.steps=9", "run_dir=elsewhere")
    for words in ([f"resume={tmp_path}/a"], ["resume=auto", f"run_dir={tmp_path}/a"]):
        found = continued(*words, "train.steps=12")
        assert (found.model, found.data, found.optim) == (run.model, run.data, run.optim)
        assert found.train.steps == 12 and found.train.seq_len == 32
    assert continued(f"resume={tmp_path}/a").run_dir is None, "its folder is none of its settings"


def test_typed_default_counts_over_a_saved_value(tmp_path: Path):
    described(tmp_path / "a", "model=dense_tiny", "checkpoint.interval=7")
    found = continued(f"resume={tmp_path}/a", "checkpoint.interval=100")
    assert found.checkpoint.interval == 100


@pytest.mark.full
def test_typed_option_replaces_its_whole_section(tmp_path: Path):
    described(tmp_path / "a", *TINY, "parallel.tp=2")
    found = continued(f"resume={tmp_path}/a", "model=dense_tiny", "parallel=single")
    assert found.model.num_layers == 4 and found.parallel.tp == 1
    assert found.train.seq_len == 32


def test_typed_experiment_counts_over_saved_settings(tmp_path: Path):
    described(tmp_path / "a", *TINY, "train.steps=99", "log=none", "optim.lr=0.5")
    found = continued(f"resume={tmp_path}/a", "+experiment=smoke", "train.eval_interval=3")
    assert found.train.steps == 10 and found.train.eval_interval == 3
    assert found.log.console and not found.log.wandb, "its option of log"
    assert found.optim.lr == 0.5 and found.model.num_layers == 1, "which it leaves alone"


@pytest.mark.full
def test_keys_of_sections_that_only_the_saved_run_has(tmp_path: Path):
    described(tmp_path / "a", "model=deepseek_v2_lite", "hardware=h200")
    found = continued(f"resume={tmp_path}/a", "model.mla.kv_lora_rank=256")
    assert found.model.mla and found.model.mla.kv_lora_rank == 256
    assert found.hardware.profile is not None


@pytest.mark.full
def test_run_without_settings_is_as_typed(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / CONFIG).touch()  # as a process leaves it that was killed at its start
    for place in ("missing", "empty"):
        found = continued("resume=auto", f"run_dir={tmp_path}/{place}", "model=dense_tiny")
        assert found.model == load_overrides(["model=dense_tiny"]).model
    assert settings_line(Typed(("resume=auto",))) is None


@pytest.mark.full
@pytest.mark.parametrize("launched", [True, False], ids=["launched", "typed"])
def test_processes_of_a_run_that_continues(tmp_path: Path, launched: bool):
    """By itself it has as many as before; a launcher, or what is typed, says otherwise."""
    if launched:
        described(tmp_path / "a", *TINY, world_size=2)
    else:
        described(tmp_path / "a", *TINY, "parallel.dp=2")
    resume = f"resume={tmp_path}/a"
    assert continued(resume).world_size == 2
    assert continued(resume, world_size=1).dp == 1
    assert continued(resume, world_size=2).dp == 2
    assert continued(resume, "parallel.dp=1").world_size == 1
    assert continued(resume, "parallel.tp=2", "parallel.dp=1").world_size == 2
    assert continued(resume, "parallel.world_size=1").dp == 1


@pytest.mark.full
def test_keys_of_other_versions_are_named(tmp_path: Path):
    described(tmp_path / "a", *TINY)
    edited(tmp_path / "a", train__patience=3, extra={"x": 1})
    assert continued(f"resume={tmp_path}/a").model.num_layers == 1
    assert settings_line(Typed((f"resume={tmp_path}/a",))) == (
        f"of {tmp_path}/a/config.yaml; what is typed counts over them; "
        "without keys that this version lacks: train.patience, extra"
    )


def test_fp8_default_of_another_version_is_left_out(tmp_path: Path):
    described(tmp_path / "a", *TINY)
    edited(tmp_path / "a", precision__fp8__amax_history=1024)
    assert continued(f"resume={tmp_path}/a").precision.fp8.amax_history == 16


def test_saved_texts_are_no_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_NAME", "other")
    described(tmp_path / "a", *TINY)
    edited(tmp_path / "a", log__group="\\${oc.env:MY_NAME}")
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "a" / CONFIG))
    assert continued(f"resume={tmp_path}/a").log.group == "\\${oc.env:MY_NAME}"


def test_accepted_data_are_accepted_once(tmp_path: Path):
    described(tmp_path / "a", *TINY, "data.accept_changed=true")
    assert not continued(f"resume={tmp_path}/a").data.accept_changed


@pytest.mark.parametrize("text", chosen(["{", "- 1", "\x00", "[" * 3000], ["{", "- 1"]))
def test_broken_settings_do_not_end_in_a_trace(tmp_path: Path, text: str):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / CONFIG).write_text(text)
    assert continued(f"resume={tmp_path}/a", "model=dense_tiny").model.num_layers == 4


# Whole runs.


def program(
    folder: Path, *words: str, draws: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **env}
    line = [sys.executable, str(ROOT / "train.py"), *words]
    return run_forked(folder, line, env=given, tree=True, draws=draws)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and a run of four steps, `a`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("\n".join(f"line {n} of a text" for n in range(900)))
    done = program(folder, *TINY, "train.steps=4", "run_dir=a")
    assert done.returncode == 0, done.stderr
    return folder


def opening(said: str, name: str) -> list[str]:
    """What the lines of this name say before the first step."""
    head = f"{name:>12}  "
    return [line.removeprefix(head) for line in said.splitlines() if line.startswith(head)]


def test_run_continues_by_its_folder_alone(trained: Path):
    done = program(trained, "resume=a", "train.steps=6", "checkpoint.keep_last=3", "optim.lr=0.002")
    assert done.returncode == 0, done.stderr
    assert opening(done.stdout, "settings") == ["of a/config.yaml; what is typed counts over them"]
    assert opening(done.stdout, "resumed") == ["a/checkpoints/step-00000004, after step 4"]
    assert opening(done.stdout, "changed") == [
        "optim.lr: 0.003 -> 0.002",
        "checkpoint.keep_last: 2 -> 3",
        "train.steps: 4 -> 6",
    ]
    done = program(trained, "resume=a/checkpoints/step-00000004", "train.steps=5", "run_dir=b")
    assert done.returncode == 0, done.stderr
    assert opening(done.stdout, "changed") == ["train.steps: 4 -> 5"]
    assert OmegaConf.load(trained / "b" / CONFIG).optim.lr == 0.003, "that of the checkpoint"


@pytest.mark.full
def test_settings_of_a_run_are_a_configuration(trained: Path):
    """Hydra's own way to them: a run of its own, in a folder of its own, by itself or in ranks."""
    done = program(
        trained, "--config-dir", "a", "--config-name", "config", "train.steps=1", "parallel.dp=2",
        "train.global_batch=4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (made,) = (trained / "runs").iterdir()
    assert opening(done.stdout, "folder") == [f"runs/{made.name}"]
    assert OmegaConf.load(made / CONFIG).model.hidden_size == 32
    assert not (trained / "outputs").exists()


NAMES = ["a$b$_{", "a b=c,d%", "\u00fc '\"\u65e5", "x${y}", "007", "(\\'"]


def test_folders_of_any_name_are_typed_and_found(tmp_path: Path):
    described(tmp_path / "plain", *TINY)
    for name in NAMES:
        (word,) = shlex.split(shell_word("run_dir", name))
        (override,) = OverridesParser.create().parse_overrides([word])
        assert str(OmegaConf.create({"word": override.value()}).word) == name
        shutil.copytree(tmp_path / "plain", tmp_path / name)
        (word,) = shlex.split(shell_word("resume", f"{tmp_path}/{name}"))
        saved = RunSettings.of(Typed((word,)))
        assert saved is not None and saved.file == tmp_path / name / CONFIG, name


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_runs_live_in_folders_of_any_name(trained: Path, name: str):
    (word,) = shlex.split(shell_word("run_dir", name))
    done = program(trained, *TINY, "train.steps=2", word, draws=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (trained / name / "loss.png").is_file() and (trained / name / "ended.json").is_file()
    (word,) = shlex.split(shell_word("resume", name))
    done = program(trained, word, "train.steps=3")
    assert (done.returncode, done.stderr) == (0, "")
    assert opening(done.stdout, "changed") == ["train.steps: 2 -> 3"]
    line = [sys.executable, "-m", "app.cli.report", name]
    done = run_forked(trained, line)
    assert done.returncode == 0, done.stderr


ENCODINGS = {
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "ascii": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


@pytest.mark.full
@pytest.mark.parametrize("encoding", chosen(ENCODINGS, ["latin-1"]))
def test_run_ends_whatever_its_output_can_encode(trained: Path, encoding: str):
    name = f"a$b$_{{ \u00fc-{encoding}"
    (word,) = shlex.split(shell_word("run_dir", name))
    env = {**os.environ, **ENCODINGS[encoding], "PYTHONPATH": str(ROOT)}

    def run(*line: str) -> tuple[bytes, bytes]:
        """Output and errors of a program; one of another locale needs an interpreter of its own."""
        if encoding == "latin-1":
            done = run_forked(trained, [sys.executable, *line], env)
            written = done.stdout.encode(encoding), done.stderr.encode(encoding)
        else:
            whole = [sys.executable, *line]
            done = subprocess.run(whole, cwd=trained, env=env, capture_output=True)
            written = done.stdout, done.stderr
        assert done.returncode == 0, written
        return written

    said, wrong = run(str(ROOT / "train.py"), *TINY, "train.steps=2", word)
    assert b"continues after \\u25b6" in said and wrong == b""
    ended = json.loads((trained / name / "ended.json").read_text())
    assert ended == {"step": 2}
    run("-m", "app.cli.report", name)
    run("-m", "app.cli.generate", name, "prompt=line", "max_new_tokens=4")


CLOSED = """
import os, runpy, sys
del sys.argv[0]
os.close(1), os.close(2)
sys.stdout = sys.stderr = None
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    os._exit(end.code or 0)
os._exit(0)
"""  # in a forked process, what a fresh one finds behind `>&- 2>&-`


@pytest.mark.parametrize("fresh", chosen([False, True], [False]), ids=["forked", "fresh"])
def test_run_ends_with_its_streams_closed(trained: Path, fresh: bool):
    line = [str(ROOT / "train.py"), *TINY, "train.steps=2", f"run_dir=closed{fresh:d}"]
    if fresh:
        typed = shlex.join([sys.executable, *line])
        done = subprocess.run(["sh", "-c", f"{typed} >&- 2>&-"], cwd=trained)
    else:
        (trained / "closed.py").write_text(CLOSED)
        done = run_forked(trained, [sys.executable, "closed.py", *line])
    assert done.returncode == 0 and (trained / f"closed{fresh:d}/ended.json").is_file()


def test_run_that_only_lacks_its_end_names_its_last_checkpoint(trained: Path):
    """As one that was killed between its last save and the name of it."""
    line = [*TINY, "train.steps=2", "checkpoint.interval=1", "run_dir=unnamed"]
    assert program(trained, *line).returncode == 0
    folder = trained / "unnamed"
    (folder / "ended.json").unlink()
    (folder / "checkpoints/latest").write_text("step-00000001")
    done = program(trained, "resume=unnamed")
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "checkpoints/latest").read_text() == "step-00000002"
    assert (folder / "ended.json").is_file()
