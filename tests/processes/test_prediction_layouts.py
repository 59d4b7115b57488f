"""Multi-token prediction trains like one process in every kind of layout, and the same bit for bit
whatever backward computes again and graphs hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import DispatcherKind, Recompute
from app.config import RecomputeConfig, Run
from app.config.model import MTPConfig
from app.engine.step.step import TrainingStep, Validation
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.layouts import LAYOUTS, expect_one_process, layout_run
from tests.processes.captured import UPDATING, WHOLE, local, same, several
from tests.runs import STEADY, TINY, batches_of, engine_of

MODEL = dataclasses.replace(TINY, mtp=MTPConfig(layers=2, loss_weight=0.5))
CAPTURABLE = dataclasses.replace(
    MODEL, moe=dataclasses.replace(MODEL.moe, dispatcher=DispatcherKind.static)
)
TIED = dataclasses.replace(MODEL, moe=None, tie_embeddings=True)


@pytest.mark.every(2)
@pytest.mark.parametrize("case", chosen(list(LAYOUTS), ["tp 2 cp 2", "pp 2 split backward"]))
@pytest.mark.parametrize("model", [MODEL, TIED], ids=["experts", "tied"])
def test_further_tokens_train_alike_in_every_layout(case: str, model):
    expect_one_process(layout_run(model, *LAYOUTS[case]))


@pytest.mark.parametrize("parallel", chosen([{}, {"tp": 2}, {"pp": 2}], [{}]), ids=str)
def test_recompute_and_graphs_change_no_bit(parallel: dict[str, Any]):
    plain = layout_run(CAPTURABLE, parallel)
    again = layout_run(CAPTURABLE, parallel, phases=(Recompute.attn_core, Recompute.norm))
    full = dataclasses.replace(plain, recompute=RecomputeConfig(full=True))
    runs = {
        "eager": plain,
        "again": again,
        "full": full,
        "captured": dataclasses.replace(again, cuda_graph=local("attn")),
        "layers": dataclasses.replace(plain, cuda_graph=local("layer")),
    }
    if not parallel:
        runs["whole"] = dataclasses.replace(plain, cuda_graph=WHOLE)
    for results in run_distributed(several, plain.world_size, runs):
        eager = results.pop("eager")
        for name, result in results.items():
            assert same(result, eager), name


def validated(rank: int, run: Run) -> list[float]:
    """Losses of steps with a validation behind each, which does not predict ahead."""
    engine = engine_of(run, rank)
    step, held_out = TrainingStep(engine), batches_of(run, 100, engine.groups.dp_rank)
    validation, seen = Validation(engine, len(held_out)), []
    for number in range(1, 5):
        report, _ = step(batches_of(run, number, engine.groups.dp_rank), lr=1e-3, weight_decay=0.1)
        seen += [report.loss, report.grad_norm, report.parts["mtp_loss"]["1"]]
        seen.append(validation(held_out)[0])
    engine.release()
    return seen


def test_validations_wait_for_parameters_that_they_do_not_read():
    """With all-gathers beside the step, those of the last layers too."""
    overlapped = dataclasses.replace(STEADY, overlap_params=True, bucket_numel=1500)
    eager = dataclasses.replace(layout_run(TIED, {"dp": 2}), optim=overlapped)
    whole = dataclasses.replace(eager, cuda_graph=UPDATING)
    found, captured = (run_distributed(validated, 2, run) for run in (eager, whole))
    assert found == captured
