"""What the programs that use a trained model do alike: join the ranks, load it, end together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from app.cli.options.messages import readable_errors
from app.cli.processes.ctrl_c import interrupt_again
from app.cli.processes.environment import joined_launch
from app.cli.processes.launch import SPEAK_S
from app.cli.processes.launcher import Launch
from app.cli.processes.reader import ends_with_its_reader
from app.config import Run
from app.engine.decoding.trained import TrainedModel, WeightSource, trained_model
from app.engine.run.attempt import Attempt
from app.errors import say

Work = Callable[[Sequence[str], Launch], int]  # arguments and place -> exit code


def run_program(
    program: str,
    help_text: str,
    arguments: Sequence[str],
    *,
    parent: int,
    work: Work,
    bare: bool = False,
) -> int:
    """Run the command line of a process that process `parent` has started; the exit code. `bare`:
    without arguments it works, where others explain themselves.
    """
    if not (arguments or bare) or {"--help", "-h"} & set(arguments):
        print(help_text)
        return 0
    with readable_errors(program, speak=True):
        launch = joined_launch(parent)
    speaks = launch.rank == 0
    with ends_with_its_reader(), readable_errors(program, speak=speaks, silent_s=SPEAK_S):
        interrupt_again()
        return work(arguments, launch)


@contextmanager
def loaded_model(source: WeightSource, run: Run, launch: Launch) -> Iterator[TrainedModel]:
    """A model over all ranks, which rank 0 tells of; they leave the block together. Raises
    ConfigError.
    """
    attempt = Attempt(launch.requeues, launch.master, store_stays=launch.agent_store)
    store = attempt.meeting_store(launch.rank, run.world_size)
    with trained_model(
        source, run, rank=launch.rank, local_rank=launch.local_rank, store=store
    ) as model:
        if launch.rank == 0:
            say(f"{source.path}: {model.described}", sys.stderr)
        yield model
        dist.barrier(model.groups.host)
