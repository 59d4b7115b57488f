"""End-to-end time of a step: pipeline, gradient reduction, update and parameter all-gather."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from app.config import HardwareProfile, Run
from app.plan.cost.part_times import PartTimes, Seconds
from app.plan.cost.rates import GIGA, MICRO, TERA, Kernels, Links
from app.plan.groups import DP_CP, EDP, PP, Group, Way
from app.plan.layout import ParallelLayout
from app.plan.memory.rank_memory import fp8_shapes
from app.plan.parts.trace import BYTES
from app.plan.pipeline.known import WorkLeft
from app.plan.pipeline.timeline import Times
from app.plan.sharding.frozen import trained_matrices
from app.plan.sharding.optimizers import PLANNED, moved_bytes
from app.plan.sharding.parameters import ChunkBuffers
from app.plan.shards import BufferLayout
from app.plan.stages import Stage, StagePlan

# bytes per parameter of a rank: its gradient is read for the norm, and zeroed unless the first one
# of a step overwrites
NORM, ZERO = 4, 4


@dataclass(frozen=True, slots=True)
class StepTail:
    """Seconds of a step beside its pipeline, on the slowest rank."""

    reduction: float  # of gradients, as far as backward does not hide it
    gathering: float  # of parameters, as far as forward does not hide it
    optimizer: float  # update, norm, zeroing, quantization of new weights
    between: float  # from one step to the next: batches, report

    @property
    def seconds(self) -> float:
        """Seconds of all of it."""
        return self.reduction + self.gathering + self.optimizer + self.between


IDLE = "idle in the pipeline"
BETWEEN = "between steps"
TAIL_LINKS = ("reduction of gradients", "gathering of parameters")
NO_TAIL = StepTail(0.0, 0.0, 0.0, 0.0)


def timeline_times(
    run: Run, layout: ParallelLayout, profile: HardwareProfile, stages: Sequence[PartTimes]
) -> Times:
    """Return the times from which the timeline of a step is simulated."""
    s = run.train.micro_batch * run.train.seq_len // (layout.cp * layout.tp)
    hidden = s * run.model.hidden_size * BYTES[run.precision.params]
    links = Links.of(run, layout, profile)
    send = profile.send_us * MICRO + max(links.parts(PP, Way.neighbours, hidden))
    weight = tuple(sum(stage.backward_weight.values()) for stage in stages)
    return Times(
        forward=tuple(sum(stage.forward.values()) for stage in stages),
        backward=tuple(
            sum(stage.backward_input.values()) + each
            for stage, each in zip(stages, weight, strict=True)
        ),
        weight=weight,
        send=send if layout.pp > 1 else 0.0,
    )


def step_tail(
    run: Run,
    layout: ParallelLayout,
    stages: StagePlan,
    profile: HardwareProfile,
    times: Sequence[PartTimes],
    buffers: Sequence[Sequence[ChunkBuffers]],
    left: Sequence[WorkLeft],
) -> StepTail:
    """Return what the slowest pipeline rank adds to a step.

    `times` are those of stages, in their order; `buffers` are [pp_rank][chunk]; `left` is the work
    of pipeline ranks after their last weight gradients. Ranks with the same times and buffers are
    timed once.
    """
    links = Links.of(run, layout, profile)
    found: dict[object, StepTail] = {}
    for pp_rank, chunks in enumerate(buffers):
        places = [stages.pipeline.stage(pp_rank, chunk) for chunk in range(len(chunks))]
        of_rank = [times[place] for place in places]
        behind = _left(left[pp_rank], of_rank) if run.optim.overlap_grads else {}
        key = tuple(map(id, of_rank)), tuple(map(id, chunks)), tuple(behind.items())
        if key not in found:
            held = stages.stages[pp_rank]
            found[key] = _rank_tail(links, chunks, times=of_rank, behind=behind, held=held)
    return max(found.values(), key=lambda tail: tail.seconds)


def _rank_tail(
    links: Links,
    chunks: Sequence[ChunkBuffers],
    *,
    times: Sequence[PartTimes],
    behind: Mapping[int, float],
    held: Sequence[Stage],
) -> StepTail:
    """Return what one pipeline rank adds to a step; times, chunks and stages `held` are its own."""
    run, layout, profile = links.run, links.layout, links.profile
    backward = sum(sum(t.backward_input.values()) for t in times) + sum(
        sum(t.backward_weight.values()) for t in times
    )
    forward = sum(sum(t.forward.values()) for t in times)
    grads = BYTES[run.precision.grads]
    params = BYTES[run.precision.params]
    optim = run.optim
    reduced = _exchanged(links, chunks, grads, window=backward if optim.overlap_grads else 0.0)
    if behind:
        reduced = _behind(links, chunks, grads, left=behind)
    return StepTail(
        reduced,
        _exchanged(links, chunks, params, window=forward if optim.overlap_params else 0.0),
        optimizer=_update(run, profile, chunks)
        + _matrices(run, links, held)
        + _quantised(run, layout, profile, held),
        between=profile.step_ms / 1e3,
    )


def _left(left: WorkLeft, chunks: Sequence[PartTimes]) -> dict[int, float]:
    """Return chunk -> seconds of the rank's compute after the chunk's last weight gradient."""
    if not left:
        return {}
    passes = ("F", "forward"), ("I", "backward_input"), ("W", "backward_weight")
    seconds = [
        {letter: sum(getattr(times, name).values()) for letter, name in passes} for times in chunks
    ]
    return {
        last: sum(count * seconds[chunk][letter] for (letter, chunk), count in work.items())
        for last, work in left.items()
    }


def _behind(
    links: Links, chunks: Sequence[ChunkBuffers], element: int, left: Mapping[int, float]
) -> float:
    """Return seconds of reductions that compute does not hide.

    Each starts when all gradients of a chunk are there, one after the other.
    """
    end = -max(left.values())  # time 0 is the end of compute
    inside = 0.0
    for chunk, seconds in left.items():
        near, whole = _passed(links, chunks[chunk], element)
        end = max(end, -seconds) + whole
        inside += near
    return max(end, inside * (1 - links.profile.hidden))


def _passed(links: Links, chunk: ChunkBuffers, element: int) -> tuple[float, float]:
    """Return seconds of one pass over a chunk's gradients or parameters: inside nodes, and in
    all.
    """
    total = inside = 0.0
    for group, buffer in ((DP_CP, chunk.dense), (EDP, chunk.expert)):
        if buffer is not None and buffer.world > 1:
            near, far = _ring(links, group, buffer, element)
            inside += near
            total += max(near, far)
    return inside, total


def _exchanged(links: Links, chunks: Sequence[ChunkBuffers], element: int, window: float) -> float:
    """Return exposed seconds of one pass over all gradients or parameters.

    `window`: seconds of compute beside it.
    """
    passes = [_passed(links, chunk, element) for chunk in chunks]
    inside, total = sum(near for near, _ in passes), sum(whole for _, whole in passes)
    if not window:
        return total
    # overlapped, both are slower: they share multiprocessors and memory
    return max(total - window, inside * (1 - links.profile.hidden))


def _ring(links: Links, group: Group, buffer: BufferLayout, element: int) -> tuple[float, float]:
    size = buffer.numel // buffer.world * (buffer.world - 1) * element
    near, far = links.parts(group, Way.ring, size)
    started = len(buffer.buckets) * links.profile.collective_us * MICRO
    return near + started, far + started


def _update(run: Run, profile: HardwareProfile, chunks: Sequence[ChunkBuffers]) -> float:
    moved = passed = 0
    for chunk in chunks:
        for buffer in (chunk.dense, chunk.expert):
            if buffer is not None:
                moved += sum(moved_bytes(kind, run.optim) * buffer.owned(kind) for kind in PLANNED)
                cleared = buffer is chunk.dense or not run.writes_expert_grads
                passed += (NORM + ZERO * cleared) * buffer.numel
    passes = passed / (profile.other_gb_s[0] * GIGA)
    return moved / (profile.optimizer_gb_s * GIGA) + passes


def _matrices(run: Run, links: Links, chunks: Sequence[Stage]) -> float:
    """Return seconds of updating whole matrices beside passes over the shard."""
    planned = PLANNED[run.optim.name]
    if not planned.has_matrices:
        return 0.0
    work = planned.work(run, links.layout, trained_matrices(run, chunks))
    sent = sum(links.seconds(group, Way.all_to_all, size) for group, size in work.sent.items())
    return work.flops / (links.profile.gemm_tflops * TERA) + sent


def _quantised(
    run: Run, layout: ParallelLayout, profile: HardwareProfile, chunks: Sequence[Stage]
) -> float:
    """Return seconds of quantizing FP8 weights of linear layers, once per update."""
    recipe = run.precision.fp8.recipe
    if recipe is None:
        return 0.0
    # the recipe's speeds do not apply to experts, whose weights have three dimensions
    elements = sum(prod(shape) for shape in fp8_shapes(run, layout, chunks) if len(shape) == 2)
    return Kernels(profile).quantised(elements, recipe)


def times_of_ranks(
    stages: StagePlan, times: Sequence[PartTimes], tail: StepTail, microbatches: int, whole: float
) -> list[dict[str, float]]:
    """Return, per pipeline rank, kind of work -> seconds of a step that takes `whole`; idle
    last.
    """
    reduction, gathering = TAIL_LINKS
    behind = {
        reduction: tail.reduction,
        gathering: tail.gathering,
        "optimizer": tail.optimizer,
        BETWEEN: tail.between,
    }
    ranks = []
    for pp_rank in range(stages.pp):
        found: Seconds = defaultdict(float)
        for chunk in range(stages.vpp):
            for kind, seconds in times[stages.pipeline.stage(pp_rank, chunk)].by_kind().items():
                found[kind] += microbatches * seconds
        shown = {kind: seconds for kind, seconds in (found | behind).items() if seconds > 0}
        ranks.append(shown | {IDLE: max(0.0, whole - sum(shown.values()))})
    return ranks
