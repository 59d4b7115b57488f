"""A checkpoint resumes at any layout, with the losses of the layout that saved it, in fp32.

One set of processes per world size saves every layout of that size and continues; another one
loads each checkpoint at all layouts of its size.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from app.choices import ScheduleName, Score
from app.config import (
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.engine.build import build_engine
from app.engine.checkpoint import load as checkpoint
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.files.checkpoints import CHECKPOINTS, newest_checkpoint, read_manifest
from app.engine.ranks.groups import Groups, create_groups
from app.engine.step.engine import Engine
from app.planner.plan import Plan
from tests.cases import chosen
from tests.checkpoints import save_checkpoint
from tests.distributed import run_distributed
from tests.parity import NUMBERS, OneProcess, Trained
from tests.runs import make_run, train_steps, whole_parameters

STEPS = 2  # before and after the checkpoint
# a smaller eps would turn gradients that are nothing but rounding into whole updates
OPTIM = OptimConfig(lr=1e-3, eps=1e-4)
MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=16,
    shared_ffn_hidden_size=16,
    score=Score.sigmoid,
    bias_update_rate=0.01,
)
SIZES = dict(
    num_layers=4, hidden_size=32, ffn_hidden_size=48, num_heads=4, num_kv_heads=4, vocab_size=64
)
MODELS = {
    "moe": ModelConfig(**SIZES, qk_norm=True, moe=MOE),
    "few": ModelConfig(**SIZES | {"num_layers": 2}, qk_norm=True, moe=MOE),
    "dense": ModelConfig(**SIZES, tie_embeddings=True),
}
SEQUENCES = {"moe": 4, "few": 4, "dense": 12}  # of a step

DEGREES: dict[str, dict[str, Any]] = {
    "single": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "pp2·vpp2": {"pp": 2, "vpp": 2},
    "pp2 in a V": {"pp": 2, "vpp": 2, "schedule": "zero_bubble_v"},
    "pp2·vpp2, empty stage": {"pp": 2, "layout": "Ett|tt||L"},
    "pp4, rank without parameters": {"pp": 4, "layout": "Ett||tt|L"},
    "ep2": {"dp": 2, "ep": 2},
    "dp3": {"dp": 3},
    "dp4": {"dp": 4},
    "tp2·ep4·etp1": {"tp": 2, "dp": 2, "ep": 4, "etp": 1},
    "tp2·ep2·etp2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "tp2·cp2·ep4·etp1": {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "etp": 1},
    "pp2·vpp2·tp2·ep2": {"pp": 2, "vpp": 2, "tp": 2, "dp": 2, "ep": 2},
}
Case = tuple[str, str]  # model and layout
CASES: tuple[Case, ...] = (
    # 3 divides neither its experts nor its batch; a rank without parameters is tried when dense.
    *(("moe", name) for name in DEGREES if name not in ("dp3", "pp4, rank without parameters")),
    *(("dense", name) for name in ("single", "dp4", "dp2", "dp3", "tp2", "pp2·vpp2", "pp2 in a V")),
    ("dense", "pp4, rank without parameters"),
)
# digest of the parameters, losses and norms, digest after them
Found = tuple[str, list[tuple[float, float]], str]


def world(case: Case) -> int:
    """Ranks of a case."""
    return prod(DEGREES[case[1]].get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))


QUICK: tuple[Case, ...] = (*(("few", name) for name in ("single", "tp2", "pp2")),)


def run_of(model: str, layout: str) -> Run:
    chosen = dict(DEGREES[layout])
    schedule = ScheduleConfig(ScheduleName(chosen.pop("schedule", "auto")))
    train = TrainConfig(steps=20, seq_len=32, micro_batch=1, global_batch=SEQUENCES[model])
    return make_run(
        MODELS[model],
        parallel=ParallelConfig(**{"dp": 1, **chosen}),
        schedule=schedule,
        train=train,
        optim=OPTIM,
    )


def engine_in(groups: dict[str, Groups], case: Case, rank: int, seed: int = 1) -> Engine:
    """The engine of a case; cases of one layout share its groups, which take long to make."""
    run = run_of(*case)
    plan = Plan(dataclasses.replace(run, train=dataclasses.replace(run.train, seed=seed)))
    if case[1] not in groups:
        groups[case[1]] = create_groups(plan.layout, rank)
    return build_engine(plan, groups[case[1]], torch.device("cpu"))


def digest(engine: Engine) -> str:
    """Return a digest of all parameters of the model; the same on every rank."""
    found = hashlib.sha256()
    for name, value in whole_parameters(engine).items():
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def save_all(rank: int, cases: list[Case], folder: Path) -> list[Found]:
    """Train and save at every layout: the parameters in the checkpoint, what follows, and the
    parameters after that.
    """
    seen, groups = [], {}
    for case in cases:
        run, engine = run_of(*case), engine_in(groups, case, rank)
        train_steps(run, engine, STEPS)
        save_checkpoint(
            folder / case[0] / case[1] / CHECKPOINTS,
            engine,
            run,
            progress=Progress(STEPS, STEPS, 0),
            cursor={"sequences": 7},
        )
        saved = digest(engine)
        seen.append((saved, train_steps(run, engine, STEPS, first=STEPS), digest(engine)))
    return seen


def load_all(rank: int, pairs: list[tuple[Case, str]], folder: Path) -> list[Found]:
    """Load into fresh engines every case, saved at a given layout, and do the same."""
    seen, groups = [], {}
    for case, source in pairs:
        path = newest_checkpoint(folder / case[0] / source)
        run, engine = run_of(*case), engine_in(groups, case, rank, seed=99)
        assert load_checkpoint(path, read_manifest(path), engine) == (
            Progress(STEPS, STEPS, 0),
            {"sequences": 7},
        )
        loaded = digest(engine)
        seen.append((loaded, train_steps(run, engine, STEPS, first=STEPS), digest(engine)))
    return seen


Saved = tuple[Path, dict[Case, Found]]


def by_world(cases: Iterable[Case]) -> Iterator[tuple[int, list[Case]]]:
    """Numbers of ranks, each with the cases that have it."""
    listed = sorted(cases, key=world)
    return ((ranks, list(found)) for ranks, found in groupby(listed, world))


@pytest.fixture(
    scope="module", params=chosen([(QUICK,), (CASES,)], [(QUICK,)]), ids=["some", "all"]
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the folder of the cases' checkpoints, and the results of their runs."""
    folder, found = tmp_path_factory.mktemp("saved"), {}
    for ranks, cases in by_world(request.param):
        results = run_distributed(save_all, ranks, cases, folder, timeout_s=600)
        assert all(other == results[0] for other in results)
        found |= dict(zip(cases, results[0], strict=True))
    return folder, {case: found[case] for case in request.param}


@pytest.fixture(scope="module")
def never_stopped(saved: Saved) -> dict[str, OneProcess]:
    """Return the results of one process without a checkpoint."""
    return {
        model: OneProcess.of(run_of(model, "single"), 2 * STEPS, first=STEPS)
        for model in dict.fromkeys(model for model, _ in saved[1])
    }


def test_any_layout_loads_any_other(saved: Saved, never_stopped: dict[str, OneProcess]):
    """Each its own, the single process's, and that of the layout before it; a single process
    loads all.
    """
    folder, wanted = saved
    for ranks, cases in by_world(wanted):
        pairs = [(case, source) for case in cases for source in sources(case, wanted)]
        for found in run_distributed(load_all, ranks, pairs, folder, timeout_s=600):
            for (case, source), (loaded, losses, after) in zip(pairs, found, strict=True):
                expected = wanted[case[0], source]
                assert loaded == expected[0], f"{source} -> {case}: parameters differ"
                if source == case[1]:
                    assert (losses, after) == expected[1:], f"{case}: not to the bit"
                never_stopped[case[0]].expect(by_step(losses), f"{source} -> {case}")


def by_step(losses: list[tuple[float, float]]) -> Trained:
    """Losses and norms of the steps after the checkpoint."""
    kinds = zip(NUMBERS, zip(*losses, strict=True), strict=True)
    return {kind: dict(enumerate(values, STEPS + 1)) for kind, values in kinds}


def sources(case: Case, cases: Iterable[Case]) -> list[str]:
    same_model = [name for model, name in cases if model == case[0]]
    if case[1] == "single":
        return same_model
    return list(dict.fromkeys([case[1], "single", same_model[same_model.index(case[1]) - 1]]))


def opened_files(rank: int, folder: Path, model: str, layout: str) -> list[str]:
    """Names of the files that a rank maps."""
    opened = []

    def recorded(path: Path, framework: str) -> safe_open:
        opened.append(path.name)
        return safe_open(path, framework)

    checkpoint.safe_open = recorded  # this process is about to end
    path = newest_checkpoint(folder / model / layout)
    load_checkpoint(path, read_manifest(path), engine_in({}, (model, layout), rank))
    return sorted(opened)


def test_a_rank_opens_only_what_it_needs(saved: Saved):
    folder, cases = saved
    model, file = next(iter(cases))[0], checkpoint.rank_file
    assert run_distributed(opened_files, 2, folder, model, "pp2") == [[file(0)], [file(1)]]
    # Router biases are the same on all ranks, and read from the first.
    expected = [[file(0)], [file(0), file(1)]]
    assert run_distributed(opened_files, 2, folder, model, "tp2") == expected
