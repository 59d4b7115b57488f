"""Checks of Hydra's own words: flags that this program lacks, keys of folders that it replaces by
its own, plugins that are not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from app.errors import ConfigError
from app.programs import command_name
from app.shell import shell_word

COMPLETION = frozenset({"-sc", "--shell-completion"})
SHELLS = ("bash", "fish", "zsh")
ACTIONS = ("install", "uninstall", "query")  # of completion; each takes a shell
CONFIG_FLAG = "--config"  # of other programs
RUN_DIR, SWEEP_DIR = "run_dir", "hydra.sweep.dir"
# Keys by which Hydra chooses folders, and the value with which it leaves that to us.
FOLDERS = {
    "hydra.run.dir": ".",
    "hydra.output_subdir": "null",
    "hydra.job.chdir": "false",
    "hydra.sweep.subdir": ".",
}
# Sweepers and launchers in packages of their own, and our extra that brings them.
PLUGINS = {
    "hydra/sweeper=optuna": ("hydra-optuna-sweeper", "optuna"),
    "hydra/launcher=submitit_local": ("hydra-submitit-launcher", "slurm"),
    "hydra/launcher=submitit_slurm": ("hydra-submitit-launcher", "slurm"),
}


def check_completion(arguments: Sequence[str]) -> None:
    """Raise ConfigError where the flag for completion comes without an action and a shell."""
    if any(word.partition("=")[0] in ACTIONS for word in arguments):
        return
    given = next((word for word in arguments if word in SHELLS), "")
    rule = f"needs {', '.join(f'{each}=SHELL' for each in ACTIONS)}; SHELL is {', '.join(SHELLS)}"
    train = command_name("train")
    advice = f'type eval "$({train} -sc install={given or SHELLS[0]})"'
    raise ConfigError("--shell-completion", given, rule, advice=advice)


def check_config_flag(arguments: Sequence[str]) -> None:
    """Raise ConfigError for `--config FILE`, which argparse takes for a short form of several."""
    for place, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag == CONFIG_FLAG:
            file = value if equals else next(iter(arguments[place + 1 :]), "")
            path = Path(file)
            is_file = path.suffix in (".yaml", ".yml")
            words = (path.parent, path.stem) if is_file else ("FOLDER", "NAME")
            advice = "type --config-dir {} --config-name {}".format(*words)
            raise ConfigError(CONFIG_FLAG, file, "there is no such option", advice=advice)


def check_folders(overrides: Sequence[str], sweeps: bool) -> None:
    """Raise ConfigError for Hydra's keys for folders: the program writes where its own say."""
    unread = FOLDERS if sweeps else {**FOLDERS, SWEEP_DIR: ""}
    ours = SWEEP_DIR if sweeps else RUN_DIR
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key not in unread or value.lower() == unread[key]:
            continue
        named = key in ("hydra.run.dir", SWEEP_DIR)
        word = shell_word(ours, value.strip("'\"")) if named else f"{ours}=FOLDER"
        rule = f"is not read: a {'sweep' if sweeps else 'run'} writes into the folder {ours}"
        raise ConfigError(key, value, rule, advice=f"type {word}")


def check_plugins(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a sweeper or launcher whose package is not installed."""
    for override in overrides:
        word = override.lstrip("+")
        package, extra = PLUGINS.get(word, ("", ""))
        if package and find_spec(f"hydra_plugins.{package.replace('-', '_')}") is None:
            group, _, option = word.partition("=")
            rule = f"its package {package} is not installed"
            raise ConfigError(group, option, rule, advice=f"pip install 'graphfold[{extra}]'")
