"""Frame of a program that may have several ranks: help, place among the ranks, mistakes reported in
one line. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.cli.options.messages import readable_errors
from app.cli.processes.ctrl_c import interrupt_again
from app.cli.processes.environment import joined_launch
from app.cli.processes.launcher import Launch
from app.cli.processes.output import ends_with_its_reader, tells_version
from app.cli.start.launch import SPEAK_S
from app.engine.report.lasting import print_every_character
from app.programs import with_names

Work = Callable[[Sequence[str], Launch], int]  # arguments, place among the ranks -> exit code


def run_program(
    program: str,
    help_text: str,
    arguments: Sequence[str],
    *,
    parent: int,
    work: Work,
    bare: bool = False,
) -> int:
    """Run the command line of this process, started by process `parent`; return the exit code.

    Without arguments the program prints its help, unless it is `bare` and needs none.
    """
    if not (arguments or bare) or {"--help", "-h"} & set(arguments):
        with ends_with_its_reader():
            print(with_names(help_text))
        return 0
    with ends_with_its_reader():
        if tells_version(arguments):
            return 0
    print_every_character()
    with readable_errors(program, speak=True):
        launch = joined_launch(parent)
    speaks = launch.rank == 0
    with ends_with_its_reader(), readable_errors(program, speak=speaks, silent_s=SPEAK_S):
        interrupt_again()
        return work(arguments, launch)
