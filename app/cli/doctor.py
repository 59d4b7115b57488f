"""Check hosts before a run: `python -m app.cli.doctor`, alone or as the ranks of a launcher.

Exit codes: 0, also with warnings; 1 if a check fails; 2 for a mistake, reported in one line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from app.cli.processes.ctrl_c import stop_quietly
from app.cli.processes.environment import environment

if __name__ == "__main__":
    # before the imports, which take seconds: Ctrl-C meanwhile prints one line
    stop_quietly("doctor", speak=environment().get("RANK", "0") == "0")

from app.cli.host_checks.finding import CheckResult, as_json, as_text, exit_code
from app.cli.processes.launcher import Launch
from app.cli.start.launch import SPEAK_S
from app.cli.start.program import run_program
from app.errors import ConfigError, nearest

OWN = ("run_dir=", "--json")
HELP = """\
== Graphfold: check a host, or several together, before a run ==
Usage:  python -m app.cli.doctor [run_dir=FOLDER] [--json]
        srun --nodes=2 --ntasks-per-node=1 python -m app.cli.doctor [...]     a pair of nodes
        torchrun --standalone --nproc-per-node N -m app.cli.doctor [...]     links between N GPUs

  run_dir=FOLDER  where runs will be written: space, speed, locks, shared by all nodes;
                  default: runs
  --json          JSON on stdout instead of lines

A line per check: ok, skip (not measured here), warn (slower, or a risk) or fail, what was measured,
and what to do. One host takes seconds, a pair less than a minute.

  every host   GPUs, driver against torch's CUDA, ECC, clocks, PCIe and NVLink; cores, memory,
               /dev/shm, limits; network cards, variables of NCCL and gloo; storage
  several      rendezvous, open ports, clocks, same software, shared folder; latency and bandwidth
               of an all-reduce against what the links allow: over NCCL, on CPUs over gloo

Exit code: 0; 1 if a check fails; 2 for a mistake. docs/cluster.md says more."""


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """Request on the command line."""

    run_dir: Path = Path("runs")
    json: bool = False

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> DoctorRequest:
        """Read the arguments. Raises ConfigError."""
        asked = cls()
        for word in arguments:
            key, sign, value = word.partition("=")
            if word == "--json":
                asked = replace(asked, json=True)
            elif key == "run_dir" and value:
                asked = replace(asked, run_dir=Path(value))
            elif key == "run_dir":
                advice = f"for example run_dir={cls().run_dir}"
                raise ConfigError("run_dir", "", "must name a folder", advice=advice)
            else:
                rule = f"the options are {' and '.join(OWN)}; --help explains them"
                guess = nearest(key + sign, OWN)
                guess = f"{guess}{value}" if guess and guess.endswith("=") else guess
                raise ConfigError("option", word, rule, guess=guess)
        return asked

    def told(self, findings: Sequence[CheckResult], hosts: int, seconds: float) -> str:
        """Return the report."""
        return (as_json if self.json else as_text)(findings, hosts, seconds)


def work(arguments: Sequence[str], launch: Launch) -> int:
    """Check, report and return the exit code."""
    began = time.monotonic()
    asked = DoctorRequest.parse(arguments)
    from app.cli.host_checks.alone import read_all  # loads torch; mistakes are reported before

    read = read_all(asked.run_dir, environment(), launch)
    if (launch.world_size or 1) == 1:
        print(asked.told(read.findings, 1, time.monotonic() - began))
        return exit_code(read.findings)
    from app.cli.host_checks.nodes import Unreachable, leave, meeting, together

    node = replace(read, give_up=partial(give_up, asked, launch, began))
    try:
        store = meeting(launch)
        found = together(node, store)
    except Unreachable as error:
        mine = [error.finding, *node.findings]
        print(asked.told(mine, 1, time.monotonic() - began))
        return 1
    if launch.rank == 0:
        hosts = len({each.host for each in found if each.host})
        print(asked.told(found, hosts, time.monotonic() - began), flush=True)
    leave(store, launch)
    return exit_code(found)


def give_up(
    asked: DoctorRequest, launch: Launch, began: float, findings: Sequence[CheckResult]
) -> None:
    """Print what is known so far and end this process, which waits for another."""
    if launch.rank == 0:
        hosts = len({each.host for each in findings if each.host})
        print(asked.told(findings, hosts, time.monotonic() - began), flush=True)
    else:
        time.sleep(SPEAK_S)  # launchers end rank 0 when another rank ends
    os._exit(1)


def main(arguments: Sequence[str], parent: int) -> int:
    """Run the command line of this process, started by process `parent`; return the exit code."""
    return run_program("doctor", HELP, arguments, parent=parent, work=work, bare=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.getppid()))
