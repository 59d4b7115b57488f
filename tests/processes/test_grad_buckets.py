"""The table of `GradBuckets`, cell by cell, and the routes by which a gradient arrives."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.config import OptimConfig, ParallelConfig, Run
from app.model.layers.linear import ColumnParallelLinear
from app.model.layers.weight_grads import (
    ComputedGrad,
    MainGradSink,
    WeightGradQueue,
    WeightGradSink,
)
from app.optim import grad_buckets
from app.optim.buffers import FlatBuffer, ParamSpec
from app.optim.grad_buckets import Arrival, GradBuckets, GradState
from app.plan.model.weight import Weight
from app.plan.sharding.reshard import Block
from app.plan.shards import buffer_layout
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.forks import Patches
from tests.processes.captured import CHOICES, EAGER, WARMUP
from tests.runs import TINY, engine_of, make_run, train_steps

ACCUMULATING, EXPECTING, REDUCING, REDUCED = GradState
PARAMS, SIZE = 3, 4  # each parameter in a bucket of its own, or all in one


def buckets_of(
    overlaps: bool = True,
    dtype: torch.dtype = torch.float32,
    bucket: int | None = 1,
    writes_first: bool = False,
) -> GradBuckets:
    """Over all ranks; parameters are SIZE × SIZE, the last one in bucket 0."""
    block = Block.whole(SIZE, SIZE)
    specs = [
        ParamSpec(
            f"p{n}",
            nn.Parameter(torch.ones(SIZE, SIZE, dtype=dtype)),
            False,
            decay=True,
            block=block,
        )
        for n in range(PARAMS)
    ]
    layout = buffer_layout([SIZE * SIZE] * PARAMS, dist.get_world_size(), bucket_numel=bucket)
    buffer = FlatBuffer(specs, layout, torch.float32)
    return GradBuckets(buffer, dist.group.WORLD, overlaps, writes_first=writes_first)


def gemm(x: torch.Tensor, weight: nn.Parameter, sink: WeightGradSink | None) -> torch.Tensor:
    """By a linear module with this weight."""
    module = ColumnParallelLinear(Weight((SIZE, SIZE)))
    module.weight = weight
    return module(x, sink)


Event = Callable[[GradBuckets], None]
EVENTS: dict[str, Event] = {
    "zero": GradBuckets.zero,
    "expect_last": GradBuckets.expect_last,
    "arrive": lambda buckets: buckets.arrive(0),
    "reduce": GradBuckets.reduce,
    "finish": GradBuckets.finish,
}
WAYS: dict[tuple[GradState, bool], list[str]] = {  # to a state, with and without overlap
    (ACCUMULATING, True): [],
    (EXPECTING, True): ["expect_last"],
    (REDUCING, True): ["expect_last", "reduce"],
    (REDUCED, True): ["expect_last", "finish"],
    (ACCUMULATING, False): ["expect_last"],
    (REDUCING, False): ["reduce"],
    (REDUCED, False): ["finish"],
}
# state, event -> state after it, buckets whose reduce-scatter it starts; all else is a bug
TABLE = {
    (ACCUMULATING, "zero"): (ACCUMULATING, 0),
    (ACCUMULATING, "expect_last"): (EXPECTING, 0),
    (ACCUMULATING, "arrive"): (ACCUMULATING, 0),
    (ACCUMULATING, "reduce"): (REDUCING, 3),
    (ACCUMULATING, "finish"): (REDUCED, 3),
    (EXPECTING, "arrive"): (EXPECTING, 1),
    (EXPECTING, "reduce"): (REDUCING, 3),
    (EXPECTING, "finish"): (REDUCED, 3),
    (REDUCING, "reduce"): (REDUCING, 0),
    (REDUCING, "finish"): (REDUCED, 0),
    (REDUCED, "zero"): (ACCUMULATING, 0),
}


def count_starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places in memory of the buckets whose reduce-scatter begins, from here on."""
    places: list[int] = []
    reduce_scatter = grad_buckets.reduce_scatter

    def told(shard: Tensor, whole: Tensor, *more: Any, **options: Any) -> dist.Work | None:
        places.append(whole.storage_offset() // (SIZE * SIZE))
        return reduce_scatter(shard, whole, *more, **options)

    monkeypatch.setattr(grad_buckets, "reduce_scatter", told)
    return places


Outcome = tuple[GradState, int] | None  # None: an AssertionError


def outcomes(rank: int) -> dict[tuple[GradState, bool, str, bool], Outcome]:
    """Apply every event in every state, with and without overlap, and with arrivals listed."""
    found: dict[tuple[GradState, bool, str, bool], Outcome] = {}
    with Patches.context() as patch:
        started = count_starts(patch)
        for ((state, overlaps), way), event in itertools.product(WAYS.items(), EVENTS):
            for lists in (False, True) if event == "arrive" else (False,):
                buckets = buckets_of(overlaps)
                for before in way:
                    EVENTS[before](buckets)
                assert buckets.state is state
                listed: list[Arrival] = []
                if lists:
                    buckets.list_arrivals(listed)
                started.clear()
                outcome: Outcome = None
                try:
                    EVENTS[event](buckets)
                    outcome = buckets.state, len(started)
                except AssertionError:
                    assert (buckets.state, started) == (state, []), "a refusal changes nothing"
                found[state, overlaps, event, lists] = outcome
                assert listed == ([(buckets, 0)] if lists else [])
                if buckets.state is not REDUCED:
                    buckets.finish()  # on all ranks alike
    return found


def test_every_event_in_every_state():
    for found in run_distributed(outcomes, 2):
        assert len(found) == len(WAYS) * (len(EVENTS) + 1)
        for (state, overlaps, event, lists), outcome in found.items():
            expected = TABLE.get((state, event))
            if lists:
                expected = (state, 0)
            elif not overlaps and event == "expect_last" and expected is not None:
                expected = (ACCUMULATING, 0)
            assert outcome == expected, (state, overlaps, event, lists)


def started_after(rank: int, orders: Sequence[tuple[int, ...]]) -> tuple[list[int], list[Any]]:
    """Buckets that have started after each arrival in this rank's order, and the sums."""
    with Patches.context() as patch:
        started = count_starts(patch)
        buckets = buckets_of()
        buckets.buffer.grads.fill_(rank + 1)
        buckets.expect_last()
        counts = []
        for bucket in orders[rank]:
            buckets.arrive(bucket)
            counts.append(len(started))
        assert buckets.state is REDUCING and started == sorted(started)
        buckets.finish()
        shards = [
            buckets.buffer.grads[slice(*buckets.buffer.layout.shard(bucket, rank))].tolist()
            for bucket in range(buckets.num_buckets)
        ]
        return counts, shards


def test_buckets_start_in_one_order_whichever_is_complete_first():
    found = run_distributed(started_after, 2, [(2, 0, 1), (0, 1, 2)])
    assert [counts for counts, _ in found] == [[0, 1, 3], [1, 2, 3]]
    assert all(shards == [[3.0] * (SIZE * SIZE // 2)] * PARAMS for _, shards in found)


def test_a_gradient_more_than_there_are_parameters_is_a_bug():
    def twice(rank: int) -> None:
        buckets = buckets_of()
        buckets.expect_last()
        buckets.arrive(1)
        with pytest.raises(AssertionError, match="one gradient too many in bucket 1"):
            buckets.arrive(1)

    run_distributed(twice, 1)


def backward(buckets: GradBuckets, rank: int, route: str) -> None:
    """One backward of rank + 1 rows through all parameters, their gradients on a given route."""
    queue = WeightGradQueue()
    sink = {"sink": MainGradSink(buckets.add), "deferred": queue}.get(route)
    listed: list[Arrival] = []
    if route == "replayed":
        buckets.list_arrivals(listed)
    x = torch.ones(rank + 1, SIZE, dtype=buckets.buffer.params.dtype)
    state = buckets.state
    sum(gemm(x, spec.param, sink).sum() for spec in buckets.buffer.specs).backward()
    if route in ("deferred", "replayed"):
        assert buckets.state is state, "nothing has arrived"
    buckets.stop_listing()
    queue.run(buckets.add)
    for arrival in listed:
        assert arrival.buckets is buckets
        buckets.arrive(arrival.bucket)


def by_route(
    rank: int, route: str, dtype: torch.dtype, bucket: int | None, writes_first: bool
) -> list[list[float]]:
    """This rank's sums after two steps of two microbatches each."""
    buckets = buckets_of(dtype=dtype, bucket=bucket, writes_first=writes_first)
    for _ in range(2):
        buckets.zero()
        backward(buckets, rank, route)
        assert buckets.state is ACCUMULATING
        if route != "deferred":  # schedules that split the backward expect nothing
            buckets.expect_last()
        backward(buckets, rank, route)
        assert buckets.state is (ACCUMULATING if route == "deferred" else REDUCING)
        buckets.finish()
    layout = buckets.buffer.layout
    shards = (layout.shard(number, rank) for number in range(buckets.num_buckets))
    return [buckets.buffer.grads[start:stop].tolist() for start, stop in shards]


ROUTES = [
    ("autograd", torch.float32),  # adds to the sum itself
    ("autograd", torch.bfloat16),  # beside it
    ("sink", torch.bfloat16),
    ("deferred", torch.float32),
    ("deferred", torch.bfloat16),
    ("replayed", torch.float32),
    ("replayed", torch.bfloat16),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("route", "dtype"), ROUTES, ids=str)
def test_all_paths_give_same_main_gradients(route: str, dtype: torch.dtype):
    writes = (False, True) if dtype == torch.bfloat16 and route != "replayed" else (False,)
    for (bucket, buckets), first in itertools.product(((1, PARAMS), (None, 1)), writes):
        for sums in run_distributed(by_route, 2, route, dtype, bucket, first):
            # two microbatches of one row on the first rank and of two on the second
            assert len(sums) == buckets and {value for part in sums for value in part} == {6.0}


def written_first(rank: int) -> tuple[list[list[float]], list[list[str]]]:
    """Sums of this rank's shards after two steps in whose second only two parameters have
    gradients, and what became of gradients.
    """
    block = Block.whole(SIZE, SIZE)
    names = [f"p{n}" for n in range(PARAMS)]
    specs = [
        ParamSpec(
            name,
            nn.Parameter(torch.ones(SIZE, SIZE, dtype=torch.bfloat16)),
            True,
            decay=True,
            block=block,
        )
        for name in names
    ]
    layout = buffer_layout([SIZE * SIZE] * PARAMS, dist.get_world_size(), bucket_numel=1)
    buffer = FlatBuffer(specs, layout, torch.float32)
    buckets = GradBuckets(buffer, dist.group.WORLD, False, writes_first=True)
    buffer.grads.fill_(torch.nan)
    done: list[list[str]] = []

    class Told(ComputedGrad):
        def add_to(self, total: Tensor) -> None:
            done[-1].append("added")
            super().add_to(total)

        def write_to(self, total: Tensor) -> None:
            done[-1].append("written")
            total.copy_(self.value)

    for step, microbatches in enumerate(((0, 0), (1, 2))):
        buckets.zero()
        done.append([])
        for first in microbatches:
            for spec in specs[first:]:
                buckets.add(spec.param, Told(torch.full((SIZE, SIZE), rank + 1.0 + step)))
        buckets.finish()
    shards = (layout.shard(number, rank) for number in range(buckets.num_buckets))
    return [buffer.grads[start:stop].tolist() for start, stop in shards], done


def test_first_gradients_written_and_missing_ones_cleared():
    for sums, done in run_distributed(written_first, 2):
        assert done == [["written"] * 3 + ["added"] * 3, ["written", "written", "added"]]
        # the second step's: of p2 twice 2 and 3, of p1 once, of p0 nothing
        assert sorted({value for part in sums for value in part}) == [0.0, 5.0, 10.0]


def test_hooks_do_not_keep_a_buffer_alive():
    def left(rank: int) -> bool:
        buckets = buckets_of()
        params = [spec.param for spec in buckets.buffer.specs]
        gone = weakref.ref(buckets.buffer)
        del buckets
        gc.collect()
        assert len(params) == PARAMS
        return gone() is None

    assert run_distributed(left, 1) == [True]


def arrivals_of(rank: int, run: Run) -> list[tuple[Counter[str], set[GradState]]]:
    """Per step: counted last gradients by bucket, and states when what is left is reduced."""
    steps: list[tuple[Counter[str], set[GradState]]] = []
    count, reduce, zero = GradBuckets._count, GradBuckets.reduce, GradBuckets.zero

    def name(buckets: GradBuckets, bucket: int) -> str:
        return ", ".join(spec.name for spec, _ in buckets.buffer.of_bucket(bucket))

    def on_zero(buckets: GradBuckets) -> None:
        if buckets is first:
            steps.append((Counter(), set()))
        zero(buckets)

    def on_count(buckets: GradBuckets, bucket: int) -> None:
        steps[-1][0][name(buckets, bucket)] += 1
        count(buckets, bucket)

    def on_reduce(buckets: GradBuckets) -> None:
        steps[-1][1].add(buckets.state)
        reduce(buckets)

    # this process is about to end
    GradBuckets.zero, GradBuckets._count, GradBuckets.reduce = on_zero, on_count, on_reduce
    engine = engine_of(run, rank)
    first = engine.optimizer.grad_buckets[0][0]
    train_steps(run, engine, WARMUP + 3)
    engine.release()
    return steps


CASES = ["layer", "partial", "layer by slot", "attn"]


@pytest.mark.parametrize("graph", chosen(CASES, ["layer"]))
def test_replayed_graphs_count_every_gradient_once(graph: str):
    for captured in (EAGER, CHOICES[graph]):
        run = make_run(
            TINY,
            cuda_graph=captured,
            parallel=ParallelConfig(dp=2),
            optim=OptimConfig(lr=1e-2, bucket_numel=1500),
        )
        for steps in run_distributed(arrivals_of, 2, run):
            assert len(steps) == WARMUP + 3  # without graphs, a recording, two replays
            for counted, states in steps:
                expected = {bucket: len(bucket.split(", ")) for bucket in counted}
                assert len(counted) > PARAMS and counted == expected
                assert states == {REDUCING}, "nothing was left to be reduced"
