"""Runs that together have every pair of options train, and options that only change how a step is
computed change no bit.

tests/option_grid.py makes the runs. `make test` trains some, others every day; `make test-all` as
many as have every pair. A case that fails prints its values.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from app.choices import (
    DispatcherKind,
    Dtype,
    Fp8Recipe,
    GraphImpl,
    GraphScope,
    ScheduleName,
    StaticOverflow,
)
from app.cli.options.compose import all_keys
from app.config import CudaGraphConfig, RecomputeConfig, Run
from app.config.experts import StaticConfig
from app.data.feed import Batch, make_batch
from app.engine.integrity.check import IntegrityCheck
from app.engine.report.metrics import Meter
from app.engine.step.step import TrainingStep, Validation
from app.errors import Diverged
from app.optim.lr import lr_at
from app.rules import check
from tests import option_grid
from tests.distributed import run_distributed
from tests.graphed_callables import install
from tests.option_grid import Grid, command
from tests.runs import engine_of, whole_gradients, whole_parameters

BOUNDARY = 0  # the token that ends a document where documents are kept apart


def batches_of(run: Run, step: int, dp_rank: int) -> list[Batch]:
    """This replica's microbatches of one step."""
    draw = np.random.default_rng((step, dp_rank))
    shape = run.num_microbatches, run.train.micro_batch, run.train.seq_len + 1
    rows = draw.integers(0, run.model.vocab_size, shape)
    rows[draw.random(shape) < 0.1] = BOUNDARY
    most = run.data.most_documents(run.train.seq_len)
    return [make_batch([*each], None if most is None else BOUNDARY, most) for each in rows]


def trained(rank: int, run: Run, steps: int) -> dict[str, Any]:
    """Return the exact results of some steps and validations.

    Without tensors if the run ends early, as with on_overflow=stop.
    """
    torch.manual_seed(rank)
    engine = engine_of(run, rank)
    dp_rank = engine.groups.dp_rank
    step, meter, seen = TrainingStep(engine), Meter(engine, first_step=1), []
    every = run.train.replay_every
    replays = None if every is None else IntegrityCheck(step, every)
    held_out = batches_of(run, 100, dp_rank)[: run.eval_microbatches]
    validation = Validation(engine, len(held_out))
    for number in range(1, steps + 1):
        rates = lr_at(number, run), run.optim.weight_decay
        try:
            given = batches_of(run, number, dp_rank)
            report, totals = step(given, *rates)
        except Diverged:
            moe = run.model.moe
            assert moe is not None and moe.static.on_overflow is StaticOverflow.stop
            engine.release()
            return {"seen": seen}
        meter.count(totals)
        if replays is not None and number < steps:  # it overwrites gradients
            assert replays.after(number, given) is None
        counts = {place: counts_E.tolist() for place, counts_E in totals.counts.items()}
        seen.append((report.loss, report.grad_norm, report.aux_loss, report.z_loss, counts))
        seen.append(validation(held_out))
    report.step, report.step_ms = run.train.steps, 1e3
    meter.complete(report)
    tensors = {f"gradient of {name}": value for name, value in whole_gradients(engine).items()}
    tensors |= whole_parameters(engine)
    tensors |= {f"bias of {key}": router.bias_E for key, router in engine.routers()}
    engine.release()
    return {"seen": seen} | {
        name: value.float().numpy().tobytes() for name, value in tensors.items()
    }


def plainly(run: Run) -> Run:
    """The run without options that may change no bit of it: graphs, recomputation, overlaps,
    what is reported and what is checked, and on one rank dispatchers.
    """
    model = run.model
    if model.moe is not None:
        echo = dataclasses.replace(model.moe.echo, check=False)
        moe = dataclasses.replace(model.moe, echo=echo)
        if run.world_size == 1:  # on several, static dispatch adds in another order
            local = DispatcherKind.local
            moe = dataclasses.replace(moe, dispatcher=local, static=StaticConfig())
        model = dataclasses.replace(model, moe=moe)
    plain = {
        "model": model,
        "recompute": RecomputeConfig(),
        "cuda_graph": CudaGraphConfig(),
        "schedule": dataclasses.replace(run.schedule, overlap_p2p=False, batch_p2p=False),
        # one of the two stays: with neither, sums lie in one bucket, which rounds norms otherwise
        "optim": dataclasses.replace(
            run.optim,
            overlap_grads=run.optim.overlap_grads or run.optim.overlap_params,
            overlap_params=False,
        ),
        "train": dataclasses.replace(run.train, deterministic=True, replay_every=None),
    }
    return check(dataclasses.replace(run, **plain))


def both(rank: int, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run, and the one without options that may change no bit."""
    graphs = run.cuda_graph.impl is not GraphImpl.none
    steps = run.cuda_graph.warmup_steps + 2 if graphs else 2
    return trained(rank, run, steps), trained(rank, plainly(run), steps)


def expect_trains(run: Run, ranks: int) -> None:
    """Losses are numbers, and the same ones without graphs and the like."""
    for found, plain in run_distributed(both, ranks, run):
        losses = [loss for loss, *_ in found["seen"]]
        assert all(map(math.isfinite, losses)), losses
        if run.precision.params is not Dtype.float16:
            assert all(math.isfinite(norm_sq) for _, norm_sq, *_ in found["seen"][::2])
        # recomputation needs fewer rows, and one of the two may end before the other
        both_seen = [*zip(found.pop("seen"), plain.pop("seen"), strict=False)]
        # as text: norms in fp16 may be NaN, which equals nothing
        assert all(repr(one) == repr(other) for one, other in both_seen), both_seen
        assert [name for name in found.keys() & plain if found[name] != plain[name]] == []


SAMPLES = {1: 1, 2: 1}  # by ranks, how many runs `make test` trains
RANKS = pytest.mark.parametrize("ranks", SAMPLES)


@RANKS
def test_sampled_options_of_today_train(ranks: int, monkeypatch: pytest.MonkeyPatch):
    """Other runs every day."""
    seed = datetime.date.today().toordinal()
    expect_all_train(Grid(ranks, seed, attempts=1), SAMPLES[ranks], monkeypatch)


@RANKS
@pytest.mark.full
def test_every_pair_of_options_trains(ranks: int, monkeypatch: pytest.MonkeyPatch):
    grid = Grid(ranks, seed=0)
    expect_all_train(grid, None, monkeypatch)
    assert not grid.uncovered
    # so that what hides options, a rule or the search, does not pass for a success
    assert len(grid.refused) < 0.03 * grid.size, grid


def expect_all_train(grid: Grid, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train runs of a grid; all that fail are told at the end."""
    install(monkeypatch)
    failures, ranks, count = [], grid.options.ranks, 0
    for chosen in itertools.islice(grid.runs(), most):
        count += 1
        try:
            expect_trains(grid.options.run(chosen), ranks)
        except Exception as error:
            failures.append(f"{command(chosen, ranks)}\n{error}")
    print(f"{ranks} ranks: {grid}; {count} runs, {len(failures)} failed")
    assert not failures, "\n\n".join(failures)


def test_a_key_without_values_has_to_be_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(option_grid.NUMBERS, "model.moe.top_k")
    with pytest.raises(LookupError, match=r"model\.moe\.top_k: NUMBERS"):
        option_grid.options_of(1)


def test_only_keys_that_exist_are_named():
    keys = {*all_keys()}
    for named in ("FIXED", "NUMBERS", "DEGREES", "LEFT_OUT"):
        assert keys.issuperset(getattr(option_grid, named)), named


def test_every_member_and_preset_of_a_group_is_in_the_grid():
    values = option_grid.options_of(1).values
    assert {*values["precision.fp8.recipe"]} == {None, *Fp8Recipe}
    assert {*values["model.moe.dispatcher"]} == {*DispatcherKind}
    assert values["cuda_graph.optimizer"] == (False, True)
    partial = tuple(map(GraphScope, ("attn", "mlp", "moe_router", "moe_preprocess")))
    assert partial in values["cuda_graph.scope"]


@pytest.mark.full
def test_search_changes_several_keys_for_a_value():
    """Interleaved stages need pipeline ranks, and several stages on each."""
    options = option_grid.options_of(2)
    search = option_grid.Search(options, random.Random(0))
    found = search.accepted({"schedule.name": ScheduleName.interleaved})
    assert not isinstance(found, option_grid.Refusal)
    assert options.refusal(found) is None
    assert (found["parallel.pp"], found["parallel.vpp"]) == (2, 2)
    for seed in range(8):  # this one needs both, and a schedule
        search = option_grid.Search(options, random.Random(seed))
        found = search.accepted({"schedule.group_size": 2}, attempts=option_grid.VALUE_ATTEMPTS)
        assert not isinstance(found, option_grid.Refusal), seed
    refused = search.accepted({"model.mla": option_grid.ON, "model.qkv_bias": True})
    assert isinstance(refused, option_grid.Refusal)
    assert refused.error.key in ("model.qkv_bias", "model.num_kv_heads")
