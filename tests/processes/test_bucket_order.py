"""Buckets travel in the order in which they are needed: parameters as forward reads them,
gradients as backward ends them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from app.config import ModelConfig, OptimConfig, ParallelConfig, Run
from app.model.chunk import nothing
from app.optim.adam import AdamShard
from app.optim.buffers import FlatBuffer
from app.optim.grad_buckets import GradBuckets
from app.optim.param_gather import ParamGather
from tests.distributed import run_distributed
from tests.runs import TINY, batches_of, engine_of, make_run, train_steps

EXPERT_LAYERS = [f"layers.{index}.body.experts." for index in (1, 2)]


def names(buffer: FlatBuffer, bucket: int) -> list[str]:
    return [spec.name for spec, _ in buffer.of_bucket(bucket)]


class Watched:
    """The names of each bucket, from here on in this process, which is about to end: as summed, as
    fetched, and as first waited for.
    """

    def __init__(self) -> None:
        self.summed: list[list[str]] = []
        self.fetched: list[list[str]] = []
        self.waited: list[list[str]] = []
        start, updated, ensure_gathered = (
            GradBuckets._start_next,
            ParamGather.updated,
            ParamGather.ensure_gathered,
        )

        def on_start(buckets: GradBuckets) -> None:
            self.summed.append(names(buckets.buffer, buckets._started))
            start(buckets)

        def on_update(gather: ParamGather, shard: AdamShard) -> None:
            self.fetched.append(names(shard.buffer, shard.bucket))
            updated(gather, shard)

        def on_need(gather: ParamGather, shard: AdamShard) -> None:
            if shard in gather._in_flight:
                self.waited.append(names(shard.buffer, shard.bucket))
            ensure_gathered(gather, shard)

        GradBuckets._start_next = on_start
        ParamGather.updated = on_update
        ParamGather.ensure_gathered = on_need


def orders_of(rank: int, run: Run) -> dict[str, Any]:
    """The names of each bucket of one of two stages, as fetched and as summed."""
    engine = engine_of(run, rank)
    watched = Watched()
    train_steps(run, engine, 1)
    (buffer,) = {shard.buffer for shard in engine.optimizer.shards[0]}
    return {
        "fetched": watched.fetched,
        "summed": watched.summed,
        "buckets": [end - start for start, end in buffer.layout.buckets],
        "gated": engine.chunks[0].wait_for_head is not nothing,
    }


def watch(rank: int, model: ModelConfig, bucket: int) -> dict[str, Any]:
    """Parameters of each bucket: as they are fetched, as forward first waits for them, and, per
    buffer, as they are summed.
    """
    parallel, optim = (
        ParallelConfig(world_size=2, dp=2),
        OptimConfig(lr=1e-2, warmup_steps=2, bucket_numel=bucket),
    )
    run = make_run(model, parallel=parallel, optim=optim)
    engine = engine_of(run, rank)
    (chunk,) = engine.chunks
    watched = Watched()
    train_steps(run, engine, 1)
    batch = batches_of(run, 1, rank)[0]
    context = chunk.context(batch.positions_BS, None)
    out = chunk(batch.tokens_BS, context)
    before_head = list(watched.waited)
    chunk.loss(out.x, batch.labels_BS, context)
    return {
        "fetched": watched.fetched,
        "waited": watched.waited,
        "before_head": before_head,
        "summed": watched.summed,
    }


@pytest.mark.every(2)
@pytest.mark.parametrize("bucket", [1, 2000], ids=["a parameter each", "several parameters"])
def test_buckets_are_fetched_as_forward_needs_them(bucket: int):
    for found in run_distributed(watch, 2, TINY, bucket):
        fetched = found["fetched"]
        assert found["waited"] == fetched and len(fetched) > 6
        assert (
            found["before_head"] == fetched[:-1]
            and fetched[-1][-1] == "head"
            and "embedding" in fetched[0]
        )
        kinds = [".experts." in bucket[0] for bucket in fetched]
        assert sum(before != after for before, after in pairwise(kinds)) >= 4, (
            "dense and expert ones in turn"
        )


def test_gradients_are_summed_in_the_order_of_backward():
    for found in run_distributed(watch, 2, TINY, 1):
        dense = [name for (name,) in found["summed"] if ".experts." not in name]
        assert (dense[:2], dense[-1]) == (["head", "norm.weight"], "embedding")
        layers = [int(name.split(".")[1]) for name in dense[2:-1]]
        assert layers == sorted(layers, reverse=True)
        experts = [name for (name,) in found["summed"] if ".experts." in name]
        assert [name.rsplit(".", 1)[0] + "." for name in experts[::2]] == EXPERT_LAYERS[::-1]
        first = {name: number for number, (name,) in enumerate(found["summed"])}
        assert (
            first["head"] == 0 and first["layers.2.body.experts.w_up"] < first["layers.1.attn.wqkv"]
        )


def test_a_tied_table_is_fetched_first_and_summed_last():
    for found in run_distributed(watch, 2, replace(TINY, tie_embeddings=True), 1):
        assert found["fetched"][0] == ["embedding"] == found["summed"][-1]
        assert found["before_head"] == found["waited"] == found["fetched"]


@pytest.mark.every(2)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_tied_table_on_two_stages_has_a_bucket_of_its_own(overlap: bool):
    """On the head's stage its gradient is reduced first and its rows are gathered last."""
    optim = OptimConfig(lr=1e-2, warmup_steps=2, overlap_grads=overlap, overlap_params=overlap)
    parallel = ParallelConfig(world_size=4, dp=2, pp=2)
    model = replace(TINY, moe=None, num_layers=2, tie_embeddings=True)
    run = make_run(model, parallel=parallel, optim=optim)
    first, _, last, _ = run_distributed(orders_of, 4, run)
    assert [len(found["summed"]) for found in (first, last)] == [2, 2]
    assert first["summed"][-1] == ["embedding"] == first["fetched"][0]
    assert last["summed"][0] == ["embedding"] == last["fetched"][-1]
    assert first["buckets"][-1] == last["buckets"][0] == 64 * 32
    assert (first["gated"], last["gated"]) == (False, overlap)
