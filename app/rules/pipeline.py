"""Rules on pipeline stages and schedules."""

from __future__ import annotations

from app.choices import ScheduleName
from app.config import Run
from app.errors import ConfigError, FirstOf, Instead
from app.plan.select import select_schedule, select_stages


def check_stages(run: Run) -> None:
    """Refuse layers that do not divide over stages, and vpp that the schedule does not take."""
    stages = select_stages(run)
    name = select_schedule(run, stages)
    if name is ScheduleName.zero_bubble_v and stages.vpp != 2:
        raise ConfigError(
            "parallel.vpp", stages.vpp, "schedule zero_bubble_v has two stages per rank", nearest=2
        )
    if stages.vpp > 1 and name not in CHUNKED:
        rule = f"has one stage per rank, not vpp={stages.vpp}"
        first: str | Instead = "interleaved"
        if run.parallel.pp == 1:
            rule += "; several need a pipeline, parallel.pp of at least 2"
            first = Instead("parallel.pp=2", "schedule=auto")
        raise ConfigError("schedule.name", name, rule, nearest=(first, *_fewer_stages(run)))
    if stages.vpp == 1 and name is ScheduleName.interleaved:
        rule = "needs several stages per rank, not vpp=1"
        near = (Instead("parallel.vpp=2"), Instead("schedule=auto"))
        raise ConfigError("schedule.name", name, rule, nearest=near)


def one_stage(run: Run) -> tuple[str, ...]:
    """Return the overrides that give every pipeline rank one stage."""
    if run.parallel.layout is not None:
        return ("parallel.layout=null", "parallel.vpp=1")
    return ("parallel.vpp=1",) if run.parallel.vpp > 1 else ()


def _fewer_stages(run: Run) -> tuple[Instead, ...]:
    return (Instead(*one),) if (one := one_stage(run)) else ()


def check_schedule_choice(run: Run) -> None:
    """Refuse a schedule that these pipeline ranks, stages and microbatches do not allow."""
    name = select_schedule(run, select_stages(run))
    pp = run.parallel.pp
    group = run.schedule.group_size
    if name is ScheduleName.none and pp > 1:
        raise ConfigError(
            "schedule.name",
            name,
            f"runs on one pipeline rank, not on pp={pp}",
            nearest=("auto", "1f1b", "interleaved"),
        )
    if group is not None and name is not ScheduleName.interleaved:
        raise ConfigError(
            "schedule.group_size",
            group,
            f"schedule {name.value} has no groups",
            nearest=("null", Instead("schedule=interleaved")),
        )
    if name is not ScheduleName.interleaved:
        return
    if pp == 1:
        raise ConfigError(
            "schedule.name",
            name,
            "needs pipeline ranks, and parallel.pp=1",
            nearest=Instead("schedule=auto", *one_stage(run)),
        )
    count = run.num_microbatches
    if count < pp:
        least = pp * run.train.micro_batch * run.dp
        rule = (
            f"too few microbatches of {run.train.micro_batch} for dp={run.dp}: {count}, but "
            f"interleaved needs pp={pp} or more"
        )
        raise ConfigError(
            "train.global_batch",
            run.train.global_batch,
            rule,
            nearest=(least, Instead("schedule=1f1b", *one_stage(run))),
        )
    size = pp if group is None else group
    legal = [n for n in range(pp, count + 1) if not 0 < count % n < pp]
    if size not in legal:
        named = "groups of pp" if group is None else "groups"
        if size > count:
            rule = f"{named} have more than all {count} microbatches"
        elif size < pp:
            rule = f"{named} need pp={pp} microbatches or more"
        else:
            rule = (
                f"{named} need pp={pp} microbatches or more, and of {count} in groups of {size} "
                f"the last would have {count % size}"
            )
        raise ConfigError(
            "schedule.group_size",
            group,
            rule,
            nearest=FirstOf(sorted(legal, key=lambda n: abs(n - size))[:8]),
        )


# schedules with several stages per rank
CHUNKED = (ScheduleName.interleaved, ScheduleName.zero_bubble_v)
