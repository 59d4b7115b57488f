"""Train a language model: compose the configuration, build, fit. `python train.py --help` explains the choices."""

import os
import sys
from functools import partial

from app.cli.ctrl_c import interrupt_again, stop_quietly

if __name__ == "__main__":
    stop_quietly("train.py")  # the imports take seconds

import hydra
from omegaconf import DictConfig

from app.cli.arguments import Typed
from app.cli.compose import load_run, register_schema
from app.cli.launch import Launch, carry_out, refuse_nested_sweep, settled, trial_start
from app.cli.messages import RESUMABLE, readable_errors
from app.rules import check_runnable

register_schema()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    """Compose, check, and train on this rank, or start the ranks that the layout asks for."""
    launch = Launch.from_environment(os.environ)  # here, since submitit pickles this function and calls it in a job
    trial = partial(trial_start, sys.argv[1:], launch)
    with settled(launch), readable_errors("train.py", launch.rank == 0, RESUMABLE, trial):
        run = check_runnable(load_run(config, launch.world_size))
        if code := carry_out(run, launch, __file__, os.environ):
            sys.exit(code)


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises instead of printing and exiting with 1
    interrupt_again()
    with readable_errors("train.py", speak=True):
        launch = Launch.from_environment(os.environ)
    launch.end_with_launcher()
    trial = partial(trial_start, sys.argv[1:], launch)
    with readable_errors("train.py", launch.rank == 0, RESUMABLE, trial):
        Typed.parse(sys.argv[1:])  # unknown flags: one line
        refuse_nested_sweep(launch, sys.argv[1:])
        main()
