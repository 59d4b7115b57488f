"""Everything known about a run before it starts: one value for the plan command and training.

Each part is computed on first use. A value that differs between pipeline ranks is a sequence with
one entry per pipeline rank; ranks that differ along other axes are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from app.choices import ScheduleName
from app.config import HardwareProfile, Run
from app.plan.actions import Action, Compute
from app.plan.cost.flops import StageSeconds, stage_seconds
from app.plan.cost.part_times import PartTimes
from app.plan.cost.rates import measured
from app.plan.cost.step_time import (
    IDLE,
    NO_TAIL,
    StepTail,
    step_tail,
    timeline_times,
    times_of_ranks,
)
from app.plan.cost.times import stage_times
from app.plan.cost.traffic import GroupTraffic, OrderAdvice, order_advice, plan_traffic
from app.plan.cost.volumes import most_sends
from app.plan.graphs import GraphPlan, check_graphs
from app.plan.groups import PP
from app.plan.layout import ParallelLayout, select_layout
from app.plan.memory.host_copies import HostCopies, host_copies
from app.plan.memory.rank_memory import RankMemory, plan_memory
from app.plan.pipeline.check import check
from app.plan.pipeline.known import ScheduleKey
from app.plan.pipeline.lowering import lower_all
from app.plan.pipeline.timeline import Timeline, Times, ordered_timeline
from app.plan.schedule import build_schedule
from app.plan.select import select_graphs, select_schedule, select_stages
from app.plan.sharding.frozen import frozen_in
from app.plan.sharding.parameters import ChunkBuffers, Parameter, chunk_parameters
from app.plan.stages import StagePlan
from app.planner.known import Known


@dataclass(frozen=True)
class Plan:
    """The plan of a run that has passed `app.rules.check`."""

    run: Run
    # schedules, operations and buffers shared with plans of other runs
    known: Known = field(default_factory=Known, compare=False, repr=False)

    @cached_property
    def layout(self) -> ParallelLayout:
        """Grids of ranks for dense layers and experts."""
        return select_layout(self.run)

    @cached_property
    def stages(self) -> StagePlan:
        """Layers of each pipeline stage."""
        return select_stages(self.run)

    @cached_property
    def schedule_name(self) -> ScheduleName:
        """The schedule, `auto` resolved."""
        return select_schedule(self.run, self.stages)

    def next_here(self, pp_rank: int) -> dict[int, int]:
        """Return, for chunks whose next stage is on the same rank, that stage's chunk."""
        pipeline = self.stages.pipeline
        chunks = range(self.stages.vpp)
        chunk_of = {pipeline.stage(pp_rank, chunk): chunk for chunk in chunks}
        following = {chunk: chunk_of.get(pipeline.stage(pp_rank, chunk) + 1) for chunk in chunks}
        return {chunk: after for chunk, after in following.items() if after is not None}

    @cached_property
    def schedule(self) -> list[list[Compute]]:
        """Compute actions of each pipeline rank in a training step."""
        return self.known.schedules.compute(self.schedule_key)

    @property
    def schedule_key(self) -> ScheduleKey:
        """Values that determine the lists of a training step."""
        return ScheduleKey(
            self.schedule_name.value,
            self.layout.pp,
            self.run.num_microbatches,
            num_chunks=self.stages.vpp,
            group_size=self.run.schedule.group_size,
        )

    @cached_property
    def actions(self) -> Sequence[Sequence[Action]]:
        """All actions of each pipeline rank in a training step, proved not to deadlock."""
        lists = self.known.schedules.actions(self.schedule_key, self.run.schedule.overlap_p2p)
        check(lists, self.schedule, self.stages.pipeline.v_shape)
        return lists

    def validation_actions(self, num_microbatches: int) -> list[list[Action]]:
        """Return all actions of each pipeline rank in a validation of `num_microbatches`."""
        return self._actions_of(num_microbatches, forward_only=True)

    def replay_actions(self) -> tuple[int, list[list[Action]]]:
        """Return the least number of microbatches that the schedule takes, and all actions of each
        pipeline rank in a step of so many.
        """
        group = self.run.schedule.group_size or self.layout.pp
        count = group if self.stages.vpp > 1 and not self.stages.pipeline.v_shape else 1
        return count, self._actions_of(count, forward_only=False)

    def _actions_of(self, num_microbatches: int, *, forward_only: bool) -> list[list[Action]]:
        key = self.schedule_key
        schedule = build_schedule(
            key.name,
            key.pp,
            num_microbatches,
            num_chunks=key.num_chunks,
            group_size=key.group_size,
            forward_only=forward_only,
        )
        v_shape = self.stages.pipeline.v_shape
        lists = lower_all(schedule, self.run.schedule.overlap_p2p, v_shape=v_shape)
        check(lists, schedule, v_shape)
        return lists

    @cached_property
    def graphs(self) -> tuple[GraphPlan | None, ...]:
        """Partial CUDA graphs of each rank, proved not to overwrite each other.

        None for a rank without.
        """
        graphs = select_graphs(self.run, self.stages, self.actions)
        for actions, graph in zip(self.actions, graphs, strict=True):
            if graph is not None:
                check_graphs(actions, graph)
        return graphs

    @cached_property
    def parameters(self) -> tuple[tuple[tuple[Parameter, ...], ...], ...]:
        """[pp_rank][chunk]: parameters of a rank, in order of use."""
        model, frozen = self.run.model, frozen_in(self.run)
        layout = self.layout
        return tuple(
            tuple(
                chunk_parameters(model, stage, layout, frozen=frozen, lora=self.run.adapters)
                for stage in chunks
            )
            for chunks in self.stages.stages
        )

    @cached_property
    def buffers(self) -> tuple[tuple[ChunkBuffers, ...], ...]:
        """[pp_rank][chunk]: layout of parameter and gradient buffers, and their shards."""
        run, layout, known = self.run, self.layout, self.known
        return tuple(
            tuple(known.buffers(run, layout, stage) for stage in chunks)
            for chunks in self.stages.stages
        )

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Bytes of each pipeline rank at its peak, by part."""
        ranks = plan_memory(
            self.run,
            self.layout,
            self.stages,
            buffers=self.buffers,
            actions=self.actions,
            graphs=self.graphs,
            parts=self.known.parts,
        )
        return tuple(ranks)

    @cached_property
    def host_copies(self) -> tuple[HostCopies, ...]:
        """Copies of optimizer shards in host memory, by pipeline rank; empty without."""
        return host_copies(self.run, self.buffers)

    @cached_property
    def profile(self) -> HardwareProfile | None:
        """Measured speeds that times are planned from; None if the data sheet's are used."""
        return measured(self.run)

    @cached_property
    def stage_times(self) -> tuple[PartTimes, ...]:
        """Time of one microbatch in each stage by kind of work, in stage order.

        Empty without a profile.
        """
        return self.times_at()

    def times_at(
        self, load: float | None = None, clock: float | None = None
    ) -> tuple[PartTimes, ...]:
        """Return `stage_times` at a load of the experts and a clock of the GPUs, as `stage_times`
        of app.plan.cost.times takes them; None: as planned.
        """
        if self.profile is None:
            return ()
        return tuple(
            stage_times(
                self.run,
                self.stages.in_order,
                self.layout,
                self.profile,
                pipeline=self.stages.pipeline,
                load=load,
                clock=clock,
                known=self.known.parts,
            )
        )

    @cached_property
    def stage_seconds(self) -> tuple[StageSeconds, ...]:
        """Time of one microbatch in each stage, in stage order.

        With a profile, exposed traffic included.
        """
        if self.profile is None:
            return stage_seconds(self.run, self.stages.in_order, self.layout)
        return tuple(
            StageSeconds(
                sum(times.forward.values()),
                sum(times.backward_input.values()),
                sum(times.backward_weight.values()),
            )
            for times in self.stage_times
        )

    @cached_property
    def tail(self) -> StepTail:
        """Time of a step beside its pipeline; zero without a profile."""
        if self.profile is None:
            return NO_TAIL
        return step_tail(
            self.run,
            self.layout,
            self.stages,
            profile=self.profile,
            times=self.stage_times,
            buffers=self.buffers,
            left=self.known.schedules.work_left(self.schedule_key),
        )

    @cached_property
    def step_seconds(self) -> float:
        """Estimated time of a step."""
        return self.pipeline_seconds(self.run.num_microbatches) + self.tail.seconds

    def pipeline_seconds(self, num_microbatches: int) -> float:
        """Return the estimated time of a step's pipeline with `num_microbatches`."""
        key = replace(self.schedule_key, num_microbatches=num_microbatches)
        order = self.known.schedules.order(key)
        seconds = self._times.in_order(order.pipeline.last + 1)
        return order.makespan(seconds, self._times.send)

    @cached_property
    def times_of_ranks(self) -> list[dict[str, float]]:
        """Seconds of a step by kind of work on each pipeline rank; empty without a profile."""
        if self.profile is None:
            return []
        return times_of_ranks(
            self.stages,
            self.stage_times,
            self.tail,
            microbatches=self.run.num_microbatches,
            whole=self.step_seconds,
        )

    @property
    def time_by_kind(self) -> dict[str, float]:
        """Seconds by kind of work on the pipeline rank that idles least, largest first."""
        if not self.times_of_ranks:
            return {}
        busiest = min(self.times_of_ranks, key=lambda found: found[IDLE])
        return dict(sorted(busiest.items(), key=lambda item: -item[1]))

    @cached_property
    def traffic(self) -> tuple[GroupTraffic, ...]:
        """Bytes that each kind of group moves in a step."""
        return plan_traffic(self.run, self.layout, self.stages)

    @cached_property
    def advice(self) -> tuple[OrderAdvice, ...]:
        """Other orders of axes that would keep groups inside a node."""
        return order_advice(self.run, self.layout)

    @cached_property
    def timeline(self) -> Timeline:
        """Estimated seconds of a step's compute, with exposed traffic and sends between stages."""
        order = self.known.schedules.order(self.schedule_key)
        return ordered_timeline(self.schedule, order, self._times)

    @property
    def busiest(self) -> RankMemory:
        """The pipeline rank that needs most memory."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def gpu_memory(self) -> int:
        """Memory of one GPU, bytes."""
        return self.run.hardware.memory

    @property
    def fits(self) -> bool:
        """True if every rank fits into its GPU."""
        return self.busiest.total <= self.gpu_memory

    @cached_property
    def _times(self) -> Times:
        if self.profile is not None:
            return timeline_times(self.run, self.layout, self.profile, stages=self.stage_times)
        exposed = sum(traffic.seconds for traffic in self.traffic if traffic.exposed)
        # exposed traffic: one part in forward, two in backward, like compute
        per_pass = exposed / (self.run.num_microbatches * self.stages.vpp) / 3
        sends = self.run.num_microbatches * most_sends(self.stages.pipeline)
        send = next(
            (traffic.seconds / sends for traffic in self.traffic if traffic.name == PP.name), 0.0
        )
        return Times(
            forward=tuple(stage.forward + per_pass for stage in self.stage_seconds),
            backward=tuple(
                stage.backward_input + stage.backward_weight + 2 * per_pass
                for stage in self.stage_seconds
            ),
            weight=tuple(stage.backward_weight for stage in self.stage_seconds),
            send=send,
        )
