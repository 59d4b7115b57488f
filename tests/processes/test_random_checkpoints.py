"""A random checkpoint resumes bit for bit, and at another random layout as one process would.

A case that fails prints both command lines.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.files.checkpoints import read_manifest
from app.engine.files.run_folder import CHECKPOINTS, newest_checkpoint
from app.engine.step.engine import Engine
from tests.checkpoints import save_checkpoint
from tests.distributed import run_distributed
from tests.parity import NUMBERS, OneProcess, Trained, here
from tests.random_runs import another_layout, random_run
from tests.runs import train_steps, whole_gradients, whole_parameters

pytestmark = pytest.mark.full
STEPS = 2  # before and after the checkpoint
AT = Progress(STEPS, STEPS, 0)


def following(engine: Engine) -> Trained:
    """Return the results of the steps after the checkpoint."""
    seen = train_steps(engine.plan.run, engine, STEPS, first=STEPS)
    numbers = (dict(enumerate(values, STEPS + 1)) for values in zip(*seen, strict=True))
    tensors = {"gradients": whole_gradients(engine), "parameters": whole_parameters(engine)}
    found = {kind: {k: v.numpy() for k, v in values.items()} for kind, values in tensors.items()}
    return dict(zip(NUMBERS, numbers, strict=True)) | found


def save_and_resume(engine: Engine, folder: Path) -> Trained:
    train_steps(engine.plan.run, engine, STEPS)
    save_checkpoint(
        folder / CHECKPOINTS, engine, engine.plan.run, progress=AT, cursor={"sequences": 7}
    )
    return following(engine)


def load_and_resume(engine: Engine, folder: Path) -> Trained:
    train_steps(engine.plan.run, engine, 1)  # everything is another value before
    path = newest_checkpoint(folder)
    assert load_checkpoint(path, read_manifest(path), engine) == (AT, {"sequences": 7})
    return following(engine)


def same_bits(one: Any, other: Any) -> bool:
    return all(one[kind].keys() == other[kind].keys() for kind in one) and all(
        (other[kind][name] == value) if kind in NUMBERS else (other[kind][name] == value).all()
        for kind, values in one.items()
        for name, value in values.items()
    )


@pytest.mark.parametrize("seed", range(200, 215))
def test_a_drawn_checkpoint_resumes_anywhere(seed: int, tmp_path: Path):
    saved = random_run(seed)
    loaded = another_layout(seed, saved)
    print(saved, loaded, sep="\n")
    whole = OneProcess.of(saved.alone(), 2 * STEPS, first=STEPS)
    before = run_distributed(
        here, saved.run.world_size, saved.run, partial(save_and_resume, folder=tmp_path)
    )
    load = partial(load_and_resume, folder=tmp_path)
    for one, other in zip(
        before, run_distributed(here, saved.run.world_size, saved.run, load), strict=True
    ):
        assert same_bits(one, other), "not to the bit"
    for found in run_distributed(here, loaded.run.world_size, loaded.run, load):
        whole.expect(found, seed)
