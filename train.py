"""Train a language model: compose the configuration, build, fit. `python train.py --help` explains the choices."""

import os
import sys

import hydra
from omegaconf import DictConfig

from app.cli.compose import load_run, register_schema
from app.cli.launch import Launch, check_room, start_ranks
from app.cli.messages import readable_errors

register_schema()
launch = Launch.from_environment(os.environ)


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    """Compose, check, and train on this rank, or start the ranks that the layout asks for."""
    with readable_errors("train.py", speak=launch.rank == 0):
        run = load_run(config, launch.world_size)
        from app.engine.start import preflight, usable_gpus  # torch is loaded after the first mistakes have been reported
        from app.engine.trainer import train

        if launch.world_size is None and run.world_size > 1:
            check_room(run.world_size, usable_gpus(run))
            preflight(run)
            sys.exit(start_ranks(run.world_size, __file__, sys.argv[1:], os.environ))
        train(run, launch.rank, launch.local_rank)


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises instead of printing and exiting with 1
    with readable_errors("train.py", speak=launch.rank == 0):
        main()
