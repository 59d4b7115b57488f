"""Whatever the rules take can be planned: no part of the plan of a drawn run raises.

A case that fails prints its command line.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from app.advice.suggest import suggest
from app.cli.plan_views.tables import print_plan
from app.cli.plan_views.timeline_picture import save_timeline
from app.planner.export import WHAT, plan_json
from app.planner.plan import Plan
from tests.random_runs import random_run

pytestmark = pytest.mark.full


def planned(seed: int) -> Plan:
    """The plan of a drawn run with everything in it; every third one does not fit."""
    drawn = random_run(seed, largest=64, wild=True, graphs=seed % 2 == 1)
    if seed % 3 == 0:
        drawn = drawn.with_values({"hardware.gpu_memory_gib": 0.001})
    print(drawn)
    return Plan(drawn.run)


@pytest.mark.parametrize("seed", range(300))
def test_every_part_of_a_plan(seed: int):
    plan = planned(seed)
    suggestions = suggest(plan)
    for what in WHAT:
        assert json.loads(json.dumps(plan_json(plan, what, suggestions)))["layout"]
        with redirect_stdout(io.StringIO()) as said:
            print_plan(plan, what, suggestions)
        assert said.getvalue()
    for count in range(1, plan.run.num_microbatches + 1):
        assert len(plan.validation_actions(count)) == plan.layout.pp
    assert plan.timeline.makespan > 0 and plan.busiest.total > 0


@pytest.mark.parametrize("seed", range(300, 330))
def test_pictures(seed: int, tmp_path: Path):
    plan = planned(seed)
    assert all(path.stat().st_size for path in save_timeline(plan, tmp_path))
