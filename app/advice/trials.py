"""Memory and time of many related runs, sharing schedules between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from app.config import Run
from app.plan.actions import Action
from app.plan.memory.rank_memory import RankMemory, plan_memory
from app.plan.select import graphs_by_rank
from app.planner.attention import planned_attention
from app.planner.known import Known
from app.planner.plan import Plan

MAKING = 4  # cost of making a list, in replays of that list
# times pp microbatches: from there on no schedule but gpipe has more of them in flight, and each
# further one adds the same time
SATURATED = 2


@dataclass
class Trials:
    """Plans of runs that often share their schedules."""

    limit: int  # memory of one GPU, bytes
    work: int = 0  # actions replayed so far
    timed: int = 0  # runs whose steps were timed so far
    bounded: int = 0  # shapes of a search whose times were bounded so far
    known: Known = field(default_factory=Known)
    # runs with the library of attention that `auto` stands for
    settled: dict[Run, Run] = field(default_factory=dict)

    def progress(self) -> str:
        """Return how far a search for layouts is, in words."""
        return f"{self.bounded} shapes bounded, {self.timed} layouts planned"

    def plan(self, run: Run) -> Plan:
        """Plan a run, reusing lists of earlier ones, with the library of attention that fits."""
        if run not in self.settled:
            self.settled[run] = planned_attention(run, self._peak)
        return Plan(self.settled[run], self.known)

    def _peak(self, run: Run) -> int:
        return max(rank.total for rank in self._ranks(Plan(run, self.known), whole=False))

    def memory(self, run: Run, whole: bool = False) -> int:
        """Return bytes of the busiest rank, with all (`whole`) or just enough microbatches.

        Just enough are those that fill the pipeline.
        """
        return max(rank.total for rank in self._ranks(self.plan(run), whole))

    def fits(self, run: Run, whole: bool = False) -> bool:
        """Return whether every rank fits into its GPU, with microbatches as in `memory`.

        Ranks behind the first that does not fit are not planned.
        """
        return all(rank.total <= self.limit for rank in self._ranks(self.plan(run), whole))

    def _ranks(self, plan: Plan, whole: bool) -> Iterator[RankMemory]:
        run, key = plan.run, plan.schedule_key
        if not whole and key.name != "gpipe" and key.group_size is None:
            count = min(key.num_microbatches, SATURATED * key.pp + key.num_microbatches % key.pp)
            key = dataclasses.replace(key, num_microbatches=count)
        schedules = self.known.schedules
        made = len(schedules.computes)
        actions = schedules.compute(key)  # memory does not depend on what lowering adds
        self.work += _length(actions) * (1 + MAKING * (len(schedules.computes) - made))
        return plan_memory(
            run,
            plan.layout,
            plan.stages,
            buffers=plan.buffers,
            actions=actions,
            graphs=graphs_by_rank(run, plan.stages, actions),
            parts=self.known.parts,
        )

    def seconds(self, run: Run, most: float = inf) -> float:
        """Return the estimated time of a step, extrapolated from timelines with few microbatches.

        Two timelines that fill the pipeline give the time that each further microbatch adds. For a
        step whose busiest rank or pipeline alone takes `most` seconds or longer, that time is
        returned.
        """
        plan = self.plan(run)
        self.timed += 1
        least = busiest_seconds(plan)
        if least >= most:
            return least
        pp = plan.layout.pp
        count = run.num_microbatches
        few = SATURATED * pp + count % pp
        more = few + SATURATED * pp
        if run.schedule.group_size is not None or count <= more:
            pipeline = plan.pipeline_seconds(count)
        else:
            short, longer = (plan.pipeline_seconds(number) for number in (few, more))
            pipeline = longer + (count - more) * (longer - short) / (more - few)
        return pipeline if pipeline >= most else pipeline + plan.tail.seconds


def busiest_seconds(plan: Plan) -> float:
    """Return the seconds that the busiest pipeline rank works in a step, a lower bound of it."""
    pipeline = plan.stages.pipeline
    ranks = [0.0] * pipeline.pp
    for stage, seconds in enumerate(plan.stage_seconds):
        ranks[pipeline.rank(stage)] += seconds.total
    return plan.run.num_microbatches * max(ranks)


def _length(lists: Sequence[Sequence[Action]]) -> int:
    return sum(map(len, lists))
