"""Our sweeper, launcher and the user's folder of options, where Hydra looks for them: it takes such
classes from this namespace package only.

Every process of every run loads this file, and few sweep, so the work lies in modules that are
imported when it begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class UserOptions(SearchPathPlugin):
    """Options of the user's own, such as profiles of GPUs that `app.cli.calibrate` has written."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Look there last."""
        from app.cli.processes.home import user_conf

        if user_conf().is_dir():
            search_path.append("graphfold", f"file://{user_conf()}")


class GridSweeper(Sweeper):
    """`hydra/sweeper=grid`: all combinations, as a sweep on record that can be started again."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Note what Hydra hands to sweepers."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep; SystemExit unless all went well."""
        from app.cli.sweeps.sweep import SweepRequest, run_sweep

        run_sweep(
            SweepRequest(self.hydra_context, self.task_function, self.config, tuple(arguments))
        )


class SearchSweeper(Sweeper):
    """In the place of Optuna's sweeper: checks the search, then lets that sweeper run it."""

    def __init__(self, **options: Any) -> None:
        """Note the options of Optuna's sweeper, from Hydra's section `sweeper`."""
        self.options = options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Check the search, and set up Optuna's sweeper."""
        from hydra_plugins.hydra_optuna_sweeper.optuna_sweeper import OptunaSweeper

        from app.cli.sweeps.search import check_search

        check_search(config, hydra_context.config_loader)
        self.inner = OptunaSweeper(**self.options)
        self.inner.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials; SystemExit where the search ends early."""
        from app.cli.sweeps.search import searching

        with searching(self.options["max_failure_rate"]):
            self.inner.sweep(arguments)


class TorchrunLauncher(Launcher):
    """`hydra/launcher=torchrun`: jobs on this host, each in fresh processes. Our sweeper does the
    same without it; other sweepers call it.
    """

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Note what every job runs, with which flags, and the folder of the sweep."""
        from app.cli.options.arguments import Typed
        from app.cli.run_report.sweep_record import locked

        self.script, self.folder = inspect.getfile(task_function), Path(config.hydra.sweep.dir)
        self.typed = Typed.of_config(config.hydra)
        parser = OverridesParser.create()
        overrides = parser.parse_overrides(list(config.hydra.overrides.task))
        self.fixed = [
            each.get_key_element().lstrip("+~")
            for each in overrides
            if not each.is_sweep_override()
        ]
        self.config, asked = config, config.hydra.sweeper
        by_grid = str(asked.get("sampler", {}).get("_target_")).endswith(".GridSampler")
        self.trials = None if by_grid else asked.get("n_trials")  # that one may end earlier
        with locked(self.folder):
            pass  # made, or refused, before other sweepers write into it

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Record the jobs and run them."""
        from app.cli.sweeps.jobs import run_trials
        from app.cli.sweeps.sweep import places_here

        return run_trials(
            self.script,
            self.folder,
            job_overrides,
            typed=self.typed,
            fixed=self.fixed,
            log=self.config.log,
            places=places_here(self.config),
            more=None if self.trials is None else self.trials - initial_job_idx,
        )
