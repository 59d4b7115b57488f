"""What people know from Hydra and other programs, and this one does otherwise: one line each."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from app.cli.options import hydra_words
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_overrides, register_schema
from app.cli.options.explained import COMPOSING, explained
from app.cli.processes.launcher import Launch
from app.cli.start.launch import checked_arguments
from app.errors import ConfigError
from tests.config import CONF

REFUSED = {
    "-sc bash": (
        "--shell-completion=bash: needs install=SHELL, uninstall=SHELL, query=SHELL; "
        "SHELL is bash, fish, zsh; "
        'type eval "$(python train.py -sc install=bash)"'
    ),
    "-sc": (
        "--shell-completion=: needs install=SHELL, uninstall=SHELL, query=SHELL; "
        "SHELL is bash, fish, zsh; "
        'type eval "$(python train.py -sc install=bash)"'
    ),
    "--config my/x.yaml": (
        "--config=my/x.yaml: there is no such option; type --config-dir my --config-name x"
    ),
    "--config=x": (
        "--config=x: there is no such option; type --config-dir FOLDER --config-name NAME"
    ),
    "hydra.run.dir=a": (
        "hydra.run.dir=a: is not read: a run writes into the folder run_dir; type run_dir=a"
    ),
    "hydra.output_subdir=a": (
        "hydra.output_subdir=a: is not read: a run writes into the folder run_dir; "
        "type run_dir=FOLDER"
    ),
    "hydra.job.chdir=True": (
        "hydra.job.chdir=True: is not read: a run writes into the folder run_dir; "
        "type run_dir=FOLDER"
    ),
    "hydra.sweep.dir=a": (
        "hydra.sweep.dir=a: is not read: a run writes into the folder run_dir; type run_dir=a"
    ),
    "-m hydra.run.dir=a": (
        "hydra.run.dir=a: is not read: a sweep writes into the folder hydra.sweep.dir; "
        "type hydra.sweep.dir=a"
    ),
    "-m hydra.sweep.subdir=a": (
        "hydra.sweep.subdir=a: is not read: a sweep writes into the folder hydra.sweep.dir; "
        "type hydra.sweep.dir=FOLDER"
    ),
}


def start(words: str) -> list[str]:
    return checked_arguments(words.split(), Launch(0, 0, None))


@pytest.mark.parametrize("words", REFUSED)
def test_words_that_hydra_would_pass_over_are_refused(words: str):
    with pytest.raises(ConfigError) as refused:
        start(words)
    assert str(refused.value) == REFUSED[words]


@pytest.mark.parametrize(
    "words",
    [
        "hydra.run.dir=.",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
        "-m hydra.sweep.dir=a",
        "-sc install=bash",
        "-sc query=fish",
        "hydra.mode=MULTIRUN hydra.sweep.dir=a",
    ],
)
def test_words_that_say_what_happens_anyway_are_taken(words: str):
    assert sorted(start(words)) == sorted(words.split())


PLUGINS = {
    "hydra/sweeper=optuna": (
        "its package hydra-optuna-sweeper is not installed; pip install 'graphfold[optuna]'"
    ),
    "hydra/launcher=submitit_slurm": (
        "its package hydra-submitit-launcher is not installed; pip install 'graphfold[slurm]'"
    ),
}


@pytest.mark.parametrize("word", PLUGINS)
def test_plugins_that_are_missing_are_named(word: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hydra_words, "find_spec", lambda name: None)
    for words in (word, f"-m {word}"):
        with pytest.raises(ConfigError) as refused:
            start(words)
        assert str(refused.value) == f"{word}: {PLUGINS[word]}"


def test_plugin_that_is_installed_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hydra_words, "find_spec", lambda name: ModuleSpec(name, None))
    hydra_words.check_plugins(["hydra/sweeper=optuna", "hydra/launcher=ray"])


@pytest.mark.parametrize("key", ["log.project", "data.path", "run_dir", "train.steps"])
def test_unset_environment_variable_is_named(key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    value = "[${oc.env:NOT_SET}/x]" if key == "data.path" else "${oc.env:NOT_SET}"
    with pytest.raises(COMPOSING) as refused:
        load_overrides([f"{key}={value}"])
    assert str(explained(refused.value)) == (
        f"{key}=${{oc.env:NOT_SET}}: the environment variable NOT_SET is not set; "
        "set it, or type ${oc.env:NOT_SET,DEFAULT}"
    )


def test_unset_variable_in_run_name_is_left_to_composing():
    assert Typed.parse(["resume=${oc.env:NOT_SET}"]).overrides == ("resume=${oc.env:NOT_SET}",)
    with pytest.raises(COMPOSING) as refused:
        load_overrides(["resume=${oc.env:NOT_SET}"])
    assert "NOT_SET is not set" in str(explained(refused.value))


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("hydra.swep.dir=x", "there is no such key; did you mean hydra.sweep.dir?"),
        ("hydra.sweep.dri=x", "there is no such key; python train.py --cfg hydra prints the keys"),
        ("hydra.job.nam=x", "there is no such key; did you mean hydra.job.name?"),
        ("hydra.verbose.x=1", "there is no such key; python train.py --cfg hydra prints the keys"),
    ],
)
def test_misspelt_keys_of_hydra_are_told_by_its_own(word: str, told: str):
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(COMPOSING) as refused:
        compose("train", [word], return_hydra_config=True)
    assert str(explained(refused.value)) == f"{word}: {told}"
