from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from app.plan.lowering import lower
from app.plan.schedule import ReduceGrads, build_schedule, parse_action, signed_order

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedule.json").read_text())  # Megatron-Core 0.16.1


def lowered(text: str) -> str:
    return " ".join(map(str, lower([parse_action(word) for word in text.split()])))


def test_gathers_before_the_first_forward_and_reduces_after_the_last_backward_of_each_chunk():
    assert lowered("F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0") == "G0 F0.0 G1 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 R1 B1.0 R0"


def test_split_backward_reduces_after_its_last_weight_gradients():
    assert lowered("F0.0 F1.0 I0.0 W0.0 I1.0 W1.0") == "G0 F0.0 F1.0 I0.0 W0.0 I1.0 W1.0 R0"


def test_forwards_alone_reduce_nothing():
    assert lowered("F0.0 F1.0") == "G0 F0.0 F1.0"
    assert lower([]) == []


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zero_bubble_h1", 1), ("interleaved", 3)])
def test_compute_order_is_kept(name: str, chunks: int):
    for actions in build_schedule(name, 4, 8, chunks):
        done = lower(actions)
        assert [action for action in done if action in set(actions)] == actions
        assert signed_order(done) == signed_order(actions)
        assert len(done) == len(actions) + 2 * chunks


TRACES = [trace for trace in GOLDEN["full_traces"] if not {"gsf", "forward_only"} & set(trace["opts"])]


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"pp{trace['pp']}-vpp{trace['vpp']}-M{trace['M']}-{trace['opts']}")
def test_reductions_follow_the_backwards_that_the_golden_traces_synchronise(trace: dict):
    events = trace["events"].split()
    synchronised = [after for event, after in pairwise(events) if event == "sync_on" and after[0] == "B"]
    group = {"num_chunks": trace["vpp"], "group_size": trace["N"]} if trace["vpp"] else {}
    actions = lower(build_schedule("interleaved" if group else "1f1b", trace["pp"], trace["M"], **group)[trace["rank"]])
    reduced = [str(before) for before, action in pairwise(actions) if isinstance(action, ReduceGrads)]
    assert reduced == synchronised
