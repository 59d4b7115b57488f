"""Train a language model: compose the configuration, build, fit. `python train.py --help` explains the choices."""

import os
import sys
from functools import partial

from app.cli.ctrl_c import interrupt_again, stop_quietly

if __name__ == "__main__":
    stop_quietly("train.py")  # the imports take seconds

import hydra
from omegaconf import DictConfig

from app.cli.compose import load_run, register_schema
from app.cli.launch import Launch, best_loss, carry_out, place_job, prepare, settled, trial_start
from app.cli.messages import RESUMABLE, readable_errors
from app.rules import check_runnable

register_schema()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Compose, check, and train on this rank, or start the ranks that the layout asks for; returns the best loss."""
    launch = Launch.from_environment(os.environ)  # here, since submitit pickles this function and calls it in a job
    trial = partial(trial_start, sys.argv[1:], launch)
    with settled(launch), readable_errors("train.py", launch.rank == 0, RESUMABLE, trial):
        place_job(config)
        run = check_runnable(load_run(config, launch.world_size))
        if code := carry_out(run, launch, __file__, os.environ):
            sys.exit(code)
        return best_loss(run)


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises instead of printing and exiting with 1
    interrupt_again()
    with readable_errors("train.py", speak=True):
        launch = Launch.from_environment(os.environ)
    launch.end_with_launcher()
    trial = partial(trial_start, sys.argv[1:], launch)
    with readable_errors("train.py", launch.rank == 0, RESUMABLE, trial):
        sys.argv[1:] = prepare(sys.argv[1:], launch)
        main()
