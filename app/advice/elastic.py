"""Layout of a run whose launcher starts another number of ranks than its degrees have
(`parallel.elastic`).

All ranks choose by themselves and alike: the search is bounded by a number of plans, not by time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from operator import attrgetter

from app.advice.layouts import fastest_layouts, overrides_between
from app.advice.moves import with_values
from app.advice.trials import Trials
from app.config import Run
from app.errors import ConfigError, typed
from app.plan.formatting import count_of, gib
from app.planner.attention import AUTO
from app.planner.plan import Plan
from app.rules import check

MOST_TRIALS = 200  # layouts that a search plans
RANKS = "parallel.world_size"


def laid_out(run: Run, ranks: int | None) -> Run:
    """Return the run as `ranks` processes of a launcher train it; None: there is no launcher.

    Without `parallel.elastic`, or if its degrees make as many ranks, it is the run itself.
    Otherwise it keeps all its settings but dp, if they are legal and fit with as many ranks, and
    its hardware has no profile; or else has the fastest layout that fits. The global batch stays.
    Raises ConfigError if there is none.
    """
    asked = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, replaced=()))
    if ranks is None or not run.parallel.elastic:
        return asked
    dp = run.parallel.dp
    meant = ranks == (run.parallel.world_size or (dp or 0) * run.model_ranks)
    own = with_values(asked, {RANKS: ranks, "parallel.dp": dp if meant else None})
    found = _chosen(own, meant)
    if dp is not None:
        found = with_values(found, {"parallel.dp": found.dp})
    back = (word for word in overrides_between(found, asked) if not word.startswith(RANKS))
    replaced = dataclasses.replace(found.parallel, replaced=tuple(back))
    return dataclasses.replace(found, parallel=replaced)


def told(run: Run) -> Iterator[str]:
    """Yield the line about the settings that were chosen for the number of ranks, if any were."""
    words = [word.partition("=") for word in run.parallel.replaced if word != AUTO]
    if words:
        new = " ".join(f"{key}={typed(attrgetter(key)(run))} (was {was})" for key, _, was in words)
        follows = [key for key, _, _ in words] == ["parallel.dp"]
        why = "dp follows their number" if follows else "the fastest layout found for them"
        each = count_of(run.num_microbatches, "microbatch", "microbatches")
        yield f"{count_of(run.world_size, 'rank')} now: {new}, {each} a step; {why}"


def _chosen(run: Run, meant: bool) -> Run:
    """Return the run, or one in another layout; `meant`: the run's degrees have as many ranks.

    Raises ConfigError.
    """
    trials = Trials(Plan(run).gpu_memory)
    misfit = f"it does not fit into {gib(trials.limit)} GiB"
    try:
        if meant or run.hardware.profile is None:
            check(run)
            if meant or Plan(run).fits:
                return run
    except ConfigError as error:
        if meant and not error.key.startswith("parallel."):
            raise  # not for their number
        misfit = f"{error.key}={typed(error.value)}: {error.rule}"
    if fastest := fastest_layouts(run, trials, MOST_TRIALS):
        return fastest[0]
    number = count_of(run.world_size, "rank")
    rule = f"finds no layout of {number}; with its own degrees: {misfit}"
    raise ConfigError("parallel.elastic", True, rule, advice="start another number of ranks")
