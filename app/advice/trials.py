"""Memory and time of many runs that are changes of each other, with as little work as will do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.config import Run
from app.plan.actions import Action
from app.plan.memory.rank_memory import plan_memory
from app.plan.pipeline.known import KnownSchedules
from app.plan.plan import Plan
from app.plan.select import select_graphs

LOWERING = 4  # times as long as walking along a list takes making it
# times pp microbatches: with more, no list but gpipe's has more of them in flight, and each of them
# takes as long as the one before it
SATURATED = 2


@dataclass
class Trials:
    """Runs whose lists of actions are often the same."""

    limit: int  # memory of one GPU, bytes
    work: int = 0  # actions that have been walked along so far
    known: KnownSchedules = field(default_factory=KnownSchedules)

    def plan(self, run: Run) -> Plan:
        """Of a run, with what others have made."""
        return Plan(run, self.known)

    def memory(self, run: Run, whole: bool = False) -> int:
        """Bytes of the busiest rank: of the whole step, or with no more microbatches than it
        takes to fill the pipeline.
        """
        plan = self.plan(run)
        key = plan.schedule_key
        if not whole and key.name != "gpipe" and key.group_size is None:
            count = min(key.num_microbatches, SATURATED * key.pp + key.num_microbatches % key.pp)
            key = dataclasses.replace(key, num_microbatches=count)
        made = len(self.known.lowered)
        walks = self.known.walks(key, run.schedule.overlap_p2p)
        actions = walks.actions
        self.work += _length(actions) * (1 + LOWERING * (len(self.known.lowered) - made))
        ranks = plan_memory(
            run,
            plan.layout,
            plan.stages,
            walks=walks,
            graphs=select_graphs(run, plan.stages, actions),
        )
        return max(rank.total for rank in ranks)

    def seconds(self, run: Run) -> float:
        """Estimated time of a step: by timelines of as many microbatches as fill the pipeline, and
        of twice as many, what each of the others adds.
        """
        plan = self.plan(run)
        pp = plan.layout.pp
        count = run.num_microbatches
        few = SATURATED * pp + count % pp
        more = few + SATURATED * pp
        if run.schedule.group_size is not None or count <= more:
            return plan.step_seconds
        short, longer = (plan.pipeline_seconds(number) for number in (few, more))
        return longer + (count - more) * (longer - short) / (more - few) + plan.tail.seconds


def _length(lists: Sequence[Sequence[Action]]) -> int:
    return sum(map(len, lists))
