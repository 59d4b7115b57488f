"""Train a language model: `graphfold-train`, in a checkout `python train.py`."""

from __future__ import annotations

import os
import sys

from app.cli.processes.ctrl_c import interrupt_again, stop_quietly

if __name__ == "__main__":
    # before the imports, which take seconds: Ctrl-C meanwhile prints one line
    stop_quietly("train", speak=os.environ.get("RANK", "0") == "0")

import hydra
from omegaconf import DictConfig

from app.cli.options.arguments import CONFIG_NAME
from app.cli.options.compose import register_schema
from app.cli.options.messages import readable_errors
from app.cli.processes.home import CONF, child_paths
from app.cli.processes.launcher import Launch, take_name
from app.cli.start import launch as start
from app.engine.report.lasting import print_every_character


@hydra.main(version_base="1.3", config_path=str(CONF), config_name=CONFIG_NAME)
def main(config: DictConfig) -> float | None:
    """Check the composed configuration, then train on this rank or start the ranks that the layout
    asks for; return the best validation loss.
    """
    # inside the function: submitit pickles it and calls it in a SLURM job
    launch = Launch.from_environment(os.environ)
    if launch.submitted:
        launch.end_with_launcher(os.getppid())
    with start.submitted_job_ends_quietly(launch), start.mistakes_in_one_line(launch, sys.argv[1:]):
        run = start.runnable(start.with_sweep_run_dir(config), launch)
        code = start.carry_out(run, launch, __file__, env=os.environ)
        return start.best_loss_or_exit(run, code)


def command(parent: int) -> None:
    """Run the command line of a process that `parent` has started; SystemExit where it fails."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises instead of printing and exiting with 1
    os.environ.update(child_paths(os.environ))  # inherited by ranks and jobs of sweeps
    take_name(os.environ)
    print_every_character()
    register_schema()
    with readable_errors("train", speak=True):
        launch = Launch.from_environment(os.environ)
    launch.end_with_launcher(parent)
    stop_quietly("train", speak=launch.rank == 0)
    with start.mistakes_in_one_line(launch, sys.argv[1:]):
        sys.argv[1:] = start.checked_arguments(sys.argv[1:], launch)
        if any(word.startswith("hydra/sweeper=") for word in sys.argv):
            interrupt_again()  # other sweepers handle KeyboardInterrupt themselves
        main()


if __name__ == "__main__":
    command(os.getppid())
