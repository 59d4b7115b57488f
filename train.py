"""Train a language model: compose the configuration, build, fit. `python train.py --help` explains the choices."""

import os
import sys

from app.cli.ctrl_c import interrupt_again, stop_quietly

if __name__ == "__main__":
    stop_quietly("train.py")  # the imports take seconds

import hydra
from omegaconf import DictConfig

from app.cli.compose import load_run, register_schema
from app.cli.launch import Launch, carry_out, ended, mistakes_told, placed, prepare, settled
from app.cli.messages import readable_errors
from app.rules import check_runnable

register_schema()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Compose, check, and train on this rank, or start the ranks that the layout asks for; returns the best loss."""
    launch = Launch.from_environment(os.environ)  # here, since submitit pickles this function and calls it in a job
    with settled(launch), mistakes_told(launch, sys.argv[1:]):
        run = check_runnable(load_run(placed(config), launch.world_size))
        return ended(run, carry_out(run, launch, __file__, os.environ))


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises instead of printing and exiting with 1
    interrupt_again()
    with readable_errors("train.py", speak=True):
        launch = Launch.from_environment(os.environ)
    launch.end_with_launcher()
    with mistakes_told(launch, sys.argv[1:]):
        sys.argv[1:] = prepare(sys.argv[1:], launch)
        main()
