"""Slots for clones of hot experts as plans and rules have them, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from app.choices import DispatcherKind, StaticTransport
from app.config import ModelConfig, MoEConfig, ParallelConfig, Run, TrainConfig
from app.config.experts import EchoConfig, StaticConfig
from app.errors import ConfigError
from app.plan.cost.volumes import step_volumes
from app.plan.groups import ETP_EP
from app.plan.parts.dispatch_record import Tokens
from app.plan.parts.dispatcher import run_dispatcher
from app.plan.parts.static import PlannedStatic
from app.planner.plan import Plan
from app.planner.summary import summary_lines
from app.rules import check
from tests.config import load

HIDDEN, FFN, TOKENS = 64, 32, 64
MATRICES = {"up": 2 * HIDDEN * FFN, "down": FFN * HIDDEN}


def run_of(spares: int, transport: StaticTransport = StaticTransport.auto, ep: int = 4) -> Run:
    moe = MoEConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=FFN,
        dispatcher=DispatcherKind.static,
        static=StaticConfig(transport),
        echo=EchoConfig(spares=spares),
    )
    return check(
        Run(
            model=ModelConfig(num_layers=2, hidden_size=HIDDEN, moe=moe),
            train=TrainConfig(seq_len=TOKENS, micro_batch=1, global_batch=2 * ep),
            parallel=ParallelConfig(dp=ep, ep=ep),
        )
    )


def static_of(run: Run) -> PlannedStatic:
    dispatcher = run_dispatcher(run)
    assert isinstance(dispatcher, PlannedStatic)
    return dispatcher


def test_slots_are_further_experts_of_their_rank():
    without, dispatcher = static_of(run_of(0)), static_of(run_of(3))
    assert (without.own, without.experts) == (2, 2)
    assert (dispatcher.own, dispatcher.experts) == (2, 5)
    tokens = 4 * TOKENS
    assert without.worst_rows(TOKENS) == dispatcher.worst_rows(TOKENS) == 2 * tokens


@pytest.mark.parametrize("transport", [StaticTransport.peer, StaticTransport.collective])
def test_they_take_weights_and_gradients_once(transport: StaticTransport):
    """Weights that come by collectives are working memory."""
    runs = [run_of(spares, transport) for spares in (0, 3)]
    parts = [{part.name: part.bytes for part in Plan(run).busiest.parts} for run in runs]
    weights = 4 if transport is StaticTransport.peer else 0
    assert "clones" not in parts[0]
    assert parts[1]["clones"] == 3 * sum(MATRICES.values()) * (4 + weights)
    assert parts[1]["parameters"] == parts[0]["parameters"]
    assert parts[1]["optimizer"] == parts[0]["optimizer"]


@pytest.mark.parametrize("kind", MATRICES)
def test_what_travels(kind: str):
    """By peers what the slots of a rank get and give back, as much as it sends in the mean; by
    collectives what all slots could get.
    """
    assert static_of(run_of(0)).clone_transfer(MATRICES[kind], 2) is None
    elements = 3 * MATRICES[kind]
    for transport, ranks in ((StaticTransport.peer, 1), (StaticTransport.collective, 3)):
        transfer = static_of(run_of(3, transport)).clone_transfer(MATRICES[kind], 2)
        assert transfer is not None
        assert transfer.sends.forward == ranks * elements * 2
        assert transfer.sends.backward == ranks * elements * (2 + 4)
        # all slots' matrices as they leave and as they come, and those that are this rank's
        forward = 0 if ranks == 1 else (4 + 4 + 1) * elements * 2
        assert transfer.scratch == (
            forward,
            max(forward, 0 if ranks == 1 else 4 * elements * 4),
        )


def test_the_plan_counts_what_travels():
    def sent(spares: int) -> int:
        plan = Plan(run_of(spares, StaticTransport.peer))
        volumes = step_volumes(plan.run, plan.layout, plan.stages)
        (tokens,) = [each for each in volumes if each.group == ETP_EP]
        assert ("clones" in tokens.collectives) == (spares > 0)
        return tokens.bytes

    # of two microbatches in two layers: matrices out, twice, and gradients home, of 4 bytes each,
    # and a number of 8 bytes for each expert to three others
    each = 3 * sum(MATRICES.values()) * 4 + 8 * 8 * 3
    assert sent(1) - sent(0) == 2 * 2 * each


def test_a_line_at_the_start_says_so():
    (line,) = [line for name, line in summary_lines(Plan(run_of(1))) if name == "dispatch"]
    assert line.endswith("1 slot per rank for clones of hot experts, by target_search")


FOUR = ("model=moe_tiny", "parallel.dp=4", "parallel.ep=4", "train.global_batch=32")
CLONES = (*FOUR, "model.moe.dispatcher=static", "model.moe.echo.spares=1")


@pytest.mark.every(9)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("model.moe.echo.spares=0", "model.moe.echo.threshold=0.2"),
            r"echo\.threshold=0\.2: there are no slots .* mean model\.moe\.echo\.spares=1",
        ),
        (("parallel.ep=1",), r"echo\.spares=1: parallel\.ep=1: no other rank has experts"),
        (
            ("model.moe.dispatcher=auto",),
            r"echo\.spares=1: is for dispatcher=static, not auto.* mean model\.moe\.dispatcher=st",
        ),
        (
            ("parallel.tp=2", "parallel.dp=2", "parallel.ep=2"),
            r"echo\.spares=1: clones whole experts.* parallel\.etp=2.* mean parallel\.etp=1",
        ),
        (("model.moe.echo.spares=7",), r"echo\.spares=7: only 6 experts are on other ranks"),
        (
            ("model.moe.echo.spares=2", "model.moe.echo.algorithm=approx_bin_packing"),
            r"echo\.spares=2: algorithm=approx_bin_packing fills one slot",
        ),
        (("model.moe.echo.spares=-1",), r"echo\.spares=-1: must be at least 0"),
        (("model.moe.echo.threshold=-1",), r"echo\.threshold=-1.*: must be at least 0"),
        (
            ("model.moe.echo.threshold=3.5",),
            r"echo\.threshold=3\.5: with parallel\.ep=4 no rank has more.* mean 3\?",
        ),
    ],
    ids=str,
)
def test_options_of_clones_have_an_effect(overrides: tuple[str, ...], said: str):
    load(*CLONES)
    with pytest.raises(ConfigError, match=said):
        load(*CLONES, *overrides)


def test_ids_of_slots_count_for_peers():
    """Two bytes hold 32,767 ids, of experts and slots."""
    run = run_of(1, StaticTransport.peer)
    moe = dataclasses.replace(run.model.moe, num_experts=32_760)
    many = dataclasses.replace(run, model=dataclasses.replace(run.model, moe=moe))
    check(many)
    more = dataclasses.replace(moe, echo=EchoConfig(spares=2))
    with pytest.raises(ConfigError, match=r"static\.transport=peer: takes at most 32767 experts"):
        check(dataclasses.replace(many, model=dataclasses.replace(run.model, moe=more)))
    auto = dataclasses.replace(more, static=StaticConfig())
    run = check(dataclasses.replace(many, model=dataclasses.replace(run.model, moe=auto)))
    assert not static_of(run).peer


def test_tokens_are_as_before():
    tokens = Tokens(TOKENS, HIDDEN, 4)
    assert static_of(run_of(0)).held(tokens) == static_of(run_of(3)).held(tokens)
