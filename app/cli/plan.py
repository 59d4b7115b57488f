"""Plan a run before a GPU is used: `python -m app.cli.plan` with the overrides of train.py.

Exit codes: 0; 1 if memory is shown and the run does not fit; 2 for a mistake of the user, reported
in one line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from app.cli.processes.ctrl_c import stop_quietly
from app.cli.processes.first_line import begin_layouts

if __name__ == "__main__":
    stop_quietly("plan")  # before the imports, which take a second
    begin_layouts(sys.argv[1:])

from app.advice.faster import faster
from app.advice.layouts import compare_layouts
from app.advice.published import published_gap
from app.advice.suggest import suggest
from app.advice.trials import Trials
from app.cli.explain import EXPLAIN
from app.cli.explain import main as explain_run
from app.cli.options.advice import Asked
from app.cli.options.arguments import PLACES, Typed, flags_to_overrides, without_places
from app.cli.options.compose import load_typed
from app.cli.options.messages import readable_errors
from app.cli.options.unknown import no_such_flag
from app.cli.plan_views.tables import print_comparison, print_gap, print_plan
from app.cli.processes.output import exit_by
from app.cli.start.notices import notices
from app.config import Run
from app.errors import ConfigError, nearest, warn
from app.own_files import write_whole
from app.plan.formatting import literal_text
from app.planner.attention import planned_attention
from app.planner.export import DECODING, WHAT, Decoding, layout_json, plan_json
from app.planner.plan import Plan
from app.planner.suggestion import Suggestion
from app.programs import with_names
from app.telling import telling
from app.version import VERSION, Version

# folder for files
FOLDER = "plan"
NOWHERE = ("", "null")
REHEARSE = "rehearse"  # runs a rank: not a part of what=all
LAYOUTS = "layouts"  # searches other layouts, which takes long: not a part of what=all
WITH_MEMORY = ("all", "memory")  # values of what= that show memory
ASKED = (*WHAT[:-1], LAYOUTS, REHEARSE, WHAT[-1])
FLAGS = ("--json", "--help", "-h")
KNOWN = (*FLAGS, *PLACES)
MOST_PLANNED = 2**10  # microbatches × stages up to which advice is checked by a full plan
NUMBERS = ("tokens=", "slower=")  # options of what=layouts
COMPARE = "compare_to"  # takes the place of what=
REHEARSED = ("rank=", "steps=")  # options of what=rehearse
OWN = ("what=", "out=", f"{COMPARE}=", *NUMBERS, *REHEARSED)
HELP = """\
== Graphfold: plan a run before any GPU is used ==
Usage:  python -m app.cli.plan [what=…] [--json] [out=FOLDER] [gpu_memory_gib=N] [override …]
        python -m app.cli.plan explain RUN [--json]

  what=groups          process groups: ranks, bytes and time per step inside and across nodes
  what=stages          layers, parameters and time of every pipeline stage
  what=schedule        order of forwards and backwards, bubble, estimated time of a step
  what=graphs          CUDA graphs and their static buffers
  what=memory          memory per rank by part, whether it fits, and what to change if not
  what=decoding        KV cache of text generation, and how many texts fit at a time
  what=layouts         the fastest layouts on the same number of GPUs, with GPU hours, also on a
                       slower network; takes up to half a minute
  what=rehearse        runs one rank on this GPU, or a small one on this CPU, with the messages of
                       all others made up: its memory and compute time beside the plan
  what=all             everything but decoding, layouts and rehearse (the default); also writes
                       plan/: plan.json and a picture of the timeline
  --json               JSON on stdout instead of tables; writes no files
  out=FOLDER           folder for files, written for every what= if given; null: no files
  tokens=N             with what=layouts: tokens to train on, for GPU hours; default: train.steps
  slower=N             with what=layouts: GB/s of the slower network; default: half of
                       hardware.network_gb_s
  rank=N,…             with what=rehearse: ranks, one after the other; default: one of the
                       pipeline rank that needs most memory
  steps=N              with what=rehearse: steps to time, after two to warm up; default: 3
  compare_to=N         instead of what=: the planned TFLOP/s per GPU beside a published number of
                       the run that the overrides describe, part by part
  gpu_memory_gib=N     short for hardware.gpu_memory_gib=N; hardware=h200 sets the speeds as well
  override             any override of train.py
  explain RUN          why steps of a run took longer or shorter than planned: ms by cause
  --config-dir FOLDER  options of your own beside conf/; --config-path and --config-name as in Hydra

Examples:
  python -m app.cli.plan +experiment=llama3_8b parallel.world_size=64
  python -m app.cli.plan +experiment=deepseek_v3_2048 parallel.world_size=4096
  python -m app.cli.plan what=groups +experiment=mixtral_8x7b hardware=h200
  python -m app.cli.plan what=layouts +experiment=deepseek_v3_2048 tokens=14.8e12 slower=25
  python -m app.cli.plan what=rehearse model=moe_tiny parallel.pp=2 parallel.ep=2 parallel.dp=2
  python -m app.cli.plan compare_to=430 +experiment=mixtral_8x7b_64
  python -m app.cli.plan what=memory --json model=dense_tiny gpu_memory_gib=1

Exit code: 0; 1 if memory is shown (what=all, memory, decoding) and the run, or a single text,
does not fit; 2 for a mistake.
Options and keys: python train.py --help. How to read the output: docs/planning.md"""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The command line."""

    what: str  # one of WHAT
    as_json: bool  # JSON on stdout instead of tables
    out: Path | None  # folder for files; None writes none
    typed: Typed  # overrides and flags that describe the run
    tokens: float | None = None  # tokens that GPU hours are for; None means those of train.steps
    slower: float | None = None  # GB/s of a slower network; None means half the network's
    compare_to: float | None = None  # published TFLOP/s per GPU; None compares with none
    rank: str | None = None  # ranks to rehearse, separated by commas; None means the fullest
    steps: int = 3  # to time in a rehearsal

    @property
    def with_memory(self) -> bool:
        """Return whether memory, and with it the verdict, is shown."""
        return self.what in WITH_MEMORY


@dataclass(frozen=True)
class PlanView:
    """A plan as values and as tables, with suggestions where its memory is shown."""

    plan: Plan

    @classmethod
    def of(cls, typed: Typed) -> PlanView:
        """Plan the run that is asked for, and print notices about it. Raises ConfigError, and what
        composing raises.
        """
        plan = Plan(planned_attention(load_typed(typed)))
        for line in notices(plan.run, typed, trains=False):
            warn(line, "plan")
        return cls(plan)

    @cached_property
    def _found(self) -> tuple[tuple[Suggestion, ...], tuple[Suggestion, ...]]:
        return suggest(self.plan), faster(self.plan)

    def advice(self, what: str) -> tuple[tuple[Suggestion, ...], tuple[Suggestion, ...]]:
        """Return what makes the run fit, and what makes it faster; searched for only if shown."""
        return self._found if what in WITH_MEMORY else ((), ())

    def values(self, what: str = "all") -> dict[str, Any]:
        """Return the sections as plain values; see `app.planner.export`."""
        return plan_json(self.plan, what, *self.advice(what))

    def show(self, what: str = "all", stream: TextIO | None = None) -> None:
        """Print the sections as tables, to stdout by default."""
        print_plan(self.plan, what, *self.advice(what), stream=stream)


def parse(arguments: Sequence[str]) -> PlanRequest:
    """Separate this command's own options from overrides. Raises ConfigError."""
    if error := no_such_flag(arguments, KNOWN):
        raise error
    words, places = without_places(arguments)
    flags = [word for word in words if "=" not in word and not word.startswith("~")]
    if unknown := [flag for flag in flags if flag not in FLAGS]:
        rule = f"the options are {', '.join((*FLAGS, *PLACES))}; everything else is key=value"
        raise ConfigError("option", unknown[0], rule, guess=nearest(unknown[0], (*FLAGS, *PLACES)))
    own = dict(word.split("=", 1) for word in words if word.startswith(OWN))
    what = own.get("what", "all")
    if what not in ASKED:
        raise ConfigError("what", what, f"must be one of {', '.join(ASKED)}", guess=_shown_by(what))
    keys = ("tokens", "slower", COMPARE)
    numbers = {key: _positive(key, own[key]) for key in keys if key in own}
    if COMPARE in own and "what" in own:
        rule = f"takes the place of {COMPARE}=: leave one of them out"
        raise ConfigError("what", what, rule)
    if (key := next(iter(numbers), None)) not in (None, COMPARE) and what != LAYOUTS:
        raise ConfigError(key, own[key], "only works with what=layouts")
    if (key := next((key for key in ("rank", "steps") if key in own), "")) and what != REHEARSE:
        raise ConfigError(key, own[key], "only works with what=rehearse")
    steps = own.get("steps", "3")
    if not steps.isdigit() or not int(steps):
        raise ConfigError("steps", steps, "must be a whole number of steps, at least 1", nearest=3)
    overrides = [
        _spelled_out(word) for word in words if word not in flags and not word.startswith(OWN)
    ]
    as_json = "--json" in flags
    out = own.get("out", FOLDER if what == "all" and COMPARE not in own else "")
    folder = None if as_json or out in NOWHERE else Path(out)
    typed = Typed.parse([*places, *overrides])
    rank = own.get("rank")
    return PlanRequest(what, as_json, folder, typed=typed, **numbers, rank=rank, steps=int(steps))


def _positive(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise ConfigError(key, text, "must be a number above 0, like 25 or 14.8e12")
    return number


def _shown_by(word: str) -> str | None:
    """Return the what= value that shows `word`, as a hint; None if there is none."""
    shown = "schedule" if nearest(word, ("time", "times", "step", "bubble")) else None
    return nearest(word, ASKED) or shown


def _spelled_out(override: str) -> str:
    return f"hardware.{override}" if override.startswith("gpu_memory_gib=") else override


def main(arguments: Sequence[str]) -> int:
    """Plan, print, write files; return the exit code."""
    if {"--help", "-h"} & set(arguments):
        print(with_names(HELP))
        return 0
    if list(arguments[:1]) == [EXPLAIN]:
        return explain_run(arguments[1:])
    with readable_errors("plan", speak=True, asked=lambda: _asked(arguments)):
        asked = parse(arguments)
        view = PlanView.of(asked.typed)
        plan = view.plan
        if asked.compare_to is None:
            view.advice(asked.what)
        if asked.out:
            _make(asked.out)
        if asked.compare_to is not None:
            return _compared(plan, asked, asked.compare_to)
        if asked.what in OTHERS:
            return OTHERS[asked.what](plan, asked)
        if asked.as_json:
            print(json.dumps(view.values(asked.what)))
        else:
            view.show(asked.what)
        if asked.out:
            _write(asked.out, view.values(asked.what), plan)
    if asked.what == DECODING:
        return int(not Decoding.of(plan).together)
    return int(asked.with_memory and not plan.fits)


def _layouts(plan: Plan, asked: PlanRequest) -> int:
    """Search layouts, print them, write files; return the exit code."""
    network = plan.run.hardware.network_gb_s
    if asked.slower is not None and asked.slower >= network:
        rule = f"must be below hardware.network_gb_s={network:g}"
        raise ConfigError("slower", f"{asked.slower:g}", rule)
    trials = Trials(plan.gpu_memory)
    with telling("searching layouts", trials.progress, stream=sys.stderr):
        found = compare_layouts(plan, asked.tokens, asked.slower, trials=trials)
    described = {"layout": layout_json(plan), LAYOUTS: asdict(found)}
    if asked.as_json:
        print(json.dumps(described))
    else:
        print_comparison(plan, found)
    if asked.out:
        _write(asked.out, described)
    return int(found.fastest is None)


def _rehearsed(plan: Plan, asked: PlanRequest) -> int:
    """Rehearse ranks, print them, write files; return the exit code."""
    from app.cli.rehearse import rehearse_ranks  # loads torch

    json_only = asked.as_json
    rows = rehearse_ranks(plan, asked.typed, asked.rank, steps=asked.steps, as_json=json_only)
    described = {"layout": layout_json(plan), "rehearsed": rows}
    if json_only:
        print(json.dumps(described))
    if asked.out:
        _write(asked.out, described)
    return 0


# what= -> what prints it by itself, without a section of the plan
OTHERS: Mapping[str, Callable[[Plan, PlanRequest], int]] = MappingProxyType(
    {LAYOUTS: _layouts, REHEARSE: _rehearsed}
)


def _compared(plan: Plan, asked: PlanRequest, published: float) -> int:
    """Print the plan beside a published speed, write files; return the exit code."""
    found = published_gap(plan, published)
    described = {"layout": layout_json(plan), "published": asdict(found)}
    if asked.as_json:
        print(json.dumps(described))
    else:
        print_gap(plan, found)
    if asked.out:
        _write(asked.out, described)
    return 0


def asked_plan(typed: Typed) -> Asked:
    """Return the requested plan, which advice is tried on."""

    def load(typed: Typed) -> Run:
        plan = Plan(planned_attention(load_typed(typed)))
        if len(plan.stages.in_order) * plan.run.num_microbatches <= MOST_PLANNED:
            plan.busiest  # noqa: B018 - computes the whole plan, whose errors advice must avoid
        return plan.run

    return Asked(typed, load)


def _asked(arguments: Sequence[str]) -> Asked:
    return asked_plan(parse(flags_to_overrides(arguments, KNOWN)).typed)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError("out", folder, f"cannot be written: {error.strerror}") from error


def _make(folder: Path) -> None:
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _write(folder: Path, described: dict[str, Any], plan: Plan | None = None) -> None:
    """Write plan.json, and the timeline of a plan."""
    from app.cli.plan_views.timeline_picture import save_timeline  # matplotlib is slow to load

    content = {VERSION: Version.of().record(), **described}
    with _writing(folder), literal_text():
        write_whole(folder / "plan.json", json.dumps(content) + "\n")
        pictures = save_timeline(plan, folder) if plan is not None else []
    print(f"written: {', '.join(str(path) for path in (folder / 'plan.json', *pictures))}")


if __name__ == "__main__":
    exit_by(main)
