"""Checkpoints: exact resume, other layouts, and what is left when a process dies in the middle
or a file is damaged.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.choices import Dtype, Source
from app.config import Run
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.files.checkpoints import CHECKPOINTS, LATEST, newest_checkpoint
from app.engine.start.start import find_start
from app.engine.step.engine import Engine
from app.errors import ConfigError
from app.kernels.adamw import update_rates
from app.plan.sharding.reshard import Block, Slice, overlaps
from tests.cases import chosen
from tests.checkpoints import cursor_of, verify_checkpoint
from tests.distributed import run_distributed
from tests.parity import exact_engine
from tests.processes.checkpoint import MODELS, run_of, save
from tests.rounding import expect_alike, numbered
from tests.runs import STEADY, TINY, TINY_MOE, engine_of, train_steps, whole_parameters

STEPS = 3  # before and after the checkpoint
Parameters = dict[str, Any]  # name -> numpy array of the whole parameter


def trained_engine(run: Run, rank: int) -> tuple[Engine, Progress]:
    """An engine after STEPS updates, one skipped one, and with router biases that change the
    choice of experts.
    """
    engine = engine_of(run, rank)
    return engine, train_first(run, engine)


def train_first(run: Run, engine: Engine) -> Progress:
    """The steps before the checkpoint."""
    train_steps(run, engine, STEPS)
    engine.optimizer.step(
        update_rates(run.optim.lr, 0.1, engine.device), torch.tensor(float("nan"))
    )
    if engine.loss_scale is not None:
        engine.loss_scale.update(overflow=True)
    random = torch.Generator().manual_seed(0)
    for _, router in engine.routers():
        if router.moe.bias_update_rate:
            router.bias_E.copy_(torch.randn(router.bias_E.shape, generator=random) * 0.1)
    return Progress(STEPS + 1, STEPS, 640)


def load(path: Path, run: Run, rank: int) -> tuple[Engine, Progress, dict[str, Any]]:
    """A fresh engine with other initial weights, filled from the checkpoint."""
    engine = engine_of(
        dataclasses.replace(run, train=dataclasses.replace(run.train, seed=99)), rank
    )
    return engine, *load_checkpoint(path, verify_checkpoint(path), engine)


def parameters(engine: Engine) -> Parameters:
    return {name: value.float().numpy() for name, value in whole_parameters(engine).items()}


def follow(
    run: Run, engine: Engine
) -> tuple[list[tuple[float, float]], list[torch.Tensor], torch.Tensor]:
    """Losses and norms of the next steps, everything the optimizer then holds, and the next
    random numbers.
    """
    seen, random = train_steps(run, engine, STEPS, first=STEPS), torch.rand(4)
    whole_parameters(engine)  # brings every rank's shards together
    state = [
        value.clone()
        for piece in engine.optimizer.param_shards()
        for value in (*piece.state.values(), piece.step)
    ]
    state += [param.detach().clone() for chunk in engine.chunks for param in chunk.parameters()]
    return seen, state, random


def loss_scale(engine: Engine) -> dict[str, Any] | None:
    return None if engine.loss_scale is None else engine.loss_scale.state()


def resume_and_resume(rank: int, run: Run, folder: Path) -> dict[str, Any]:
    """Check that a run that continues after a save and one that resumes stay bit-equal."""
    engine, progress = trained_engine(run, rank)
    path, scale = save(folder, run, engine, progress=progress), loss_scale(engine)
    biases = [router.bias_E.clone() for _, router in engine.routers()]
    seen, state, random = follow(run, engine)
    fresh, loaded, cursor = load(path, run, rank)
    same_scale = loss_scale(fresh) == scale
    same_bias = all(
        torch.equal(a, router.bias_E)
        for a, (_, router) in zip(biases, fresh.routers(), strict=True)
    )
    seen_again, state_again, random_again = follow(run, fresh)
    return {
        "progress": loaded == progress,
        "cursor": cursor == cursor_of(8 * progress.step, rank),
        "bias": same_bias
        and all(bool(bias.any()) == bool(run.model.moe.bias_update_rate) for bias in biases),
        "loss scale": same_scale,
        "losses": seen == seen_again,
        "state": all(torch.equal(a, b) for a, b in zip(state, state_again, strict=True)),
        "random": torch.equal(random, random_again),
    }


SAME_LAYOUT = [
    ("dense", 1, 1, Dtype.float32), ("moe", 1, 1, Dtype.float32), ("bias", 1, 1, Dtype.bfloat16),
    ("dense", 1, 1, Dtype.float16), ("dense", 2, 1, Dtype.bfloat16),
    ("moe", 2, 2, Dtype.float32), ("bias", 2, 2, Dtype.float32), ("bias", 4, 2, Dtype.bfloat16),
]  # fmt: skip


@pytest.mark.every(9)
@pytest.mark.parametrize(("name", "dp", "ep", "params"), SAME_LAYOUT)
def test_resume_at_the_same_layout_is_bit_identical(
    name: str, dp: int, ep: int, params: Dtype, tmp_path: Path
):
    for found in run_distributed(
        resume_and_resume, dp, run_of(MODELS[name], dp, ep, params=params), tmp_path / CHECKPOINTS
    ):
        assert found == dict.fromkeys(found, True)


def save_parameters(rank: int, run: Run, folder: Path) -> Parameters:
    engine, progress = trained_engine(run, rank)
    save(folder, run, engine, progress=progress)
    return parameters(engine)


def never_stop(rank: int, run: Run) -> list[list[tuple[float, float]]]:
    """Losses and norms without a checkpoint: in fp32, and in fp64."""
    with exact_engine(rank, run) as engine:
        train_first(run, engine)
        exact = train_steps(run, engine, STEPS, first=STEPS)
    engine, _ = trained_engine(run, rank)
    return [train_steps(run, engine, STEPS, first=STEPS), exact]


def load_and_follow(
    rank: int, run: Run, path: Path
) -> tuple[Parameters, list[tuple[float, float]], set[float], list[bool]]:
    engine, *_ = load(path, run, rank)
    counts = {piece.step.item() for piece in engine.optimizer.param_shards()}
    biased = [bool(router.bias_E.any()) for _, router in engine.routers()]
    return parameters(engine), train_steps(run, engine, STEPS, first=STEPS), counts, biased


# (dp, ep)
LAYOUTS = {
    (1, 1): [(2, 1), (2, 2)],
    (2, 1): [(4, 1)],
    (2, 2): [(1, 1), (4, 4)],
    (4, 2): [(1, 1), (4, 1), (2, 2)],
}
SOURCES = chosen([(layout,) for layout in LAYOUTS], [((1, 1),), ((2, 2),)])


def steady(dp: int, ep: int) -> Run:
    return dataclasses.replace(run_of(MODELS["bias"], dp, ep), optim=STEADY)


@pytest.fixture(scope="module", params=SOURCES, ids=lambda p: f"dp{p[0]}-ep{p[1]}")
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[int, int], Path, Any]:
    """(layout, checkpoint, parameters of the run that saved it)."""
    folder = tmp_path_factory.mktemp("run") / CHECKPOINTS
    expected = run_distributed(save_parameters, request.param[0], steady(*request.param), folder)[0]
    return request.param, newest_checkpoint(folder.parent), expected


@pytest.mark.every(2)
def test_loading_at_another_layout_resumes_alike(saved: tuple[tuple[int, int], Path, Any]):
    layout, path, wanted = saved
    plain, exact = run_distributed(never_stop, 1, steady(1, 1))[0]
    for dp, ep in LAYOUTS[layout]:
        for found, seen, counts, biased in run_distributed(
            load_and_follow, dp, steady(dp, ep), path
        ):
            assert found.keys() == wanted.keys()
            assert all((found[name] == value).all() for name, value in wanted.items())
            for kind in zip(
                *(zip(*steps, strict=True) for steps in (seen, plain, exact)), strict=True
            ):
                expect_alike(*map(numbered, kind), case=(dp, ep))
            assert counts == {float(STEPS)} and all(biased)


def test_every_element_is_in_exactly_one_file(saved: tuple[tuple[int, int], Path, Any]):
    """Read by the safetensors library, at the places in the manifest."""
    (dp, _), path, wanted = saved
    files = sorted(path.glob("rank-*.safetensors"))
    assert len(files) == dp
    states = [load_file(file) for file in files]
    counts = {name: torch.zeros(value.size) for name, value in wanted.items()}
    for name, entry in verify_checkpoint(path)["parts"].items():
        whole = Slice(Block.whole(*entry["shape"]))
        for rank, start, stop, part in entry["held"]:
            tensors = [
                states[rank].pop(f"{name}.{key}") for key in ("main", "exp_avg", "exp_avg_sq")
            ]
            assert all(
                t.dtype == torch.float32 and t.shape == (part[1] - part[0],) for t in tensors
            )
            for have, place in overlaps(
                Slice(Block(tuple(entry["shape"]), tuple(start), tuple(stop)), tuple(part)), whole
            ):
                counts[name][slice(*place)] += 1
                assert torch.equal(
                    tensors[0][slice(*have)],
                    torch.from_numpy(wanted[name]).flatten()[slice(*place)],
                )
    assert all(count.eq(1).all() for count in counts.values())
    assert all(
        name.endswith(".bias_E") or name == "random.cpu" for state in states for name in state
    ), "nothing else is saved"


def precision_changes(rank: int, folder: Path) -> bool:
    narrow, wide = (run_of(TINY, params=params) for params in (Dtype.bfloat16, Dtype.float32))
    engine, progress = trained_engine(narrow, rank)
    wide_engine, *_ = load(save(folder, narrow, engine, progress=progress), wide, rank)
    mains = ([piece.main for piece in e.optimizer.param_shards()] for e in (engine, wide_engine))
    return all(torch.equal(a, b) for a, b in zip(*mains, strict=True))


@pytest.mark.full
def test_bf16_run_resumed_in_fp32_keeps_main_parameters(tmp_path: Path):
    assert run_distributed(precision_changes, 1, tmp_path / CHECKPOINTS) == [True]


def save_many(
    rank: int, folder: Path, keep_last: int, steps: list[int]
) -> list[tuple[list[str], str]]:
    run = run_of(MODELS["moe"])
    engine, found = engine_of(run, rank), []
    for step in steps:
        path = save(folder, run, engine, progress=Progress(step, step, step), keep_last=keep_last)
        assert verify_checkpoint(path)["step"] == step
        found.append((sorted(p.name for p in folder.iterdir()), (folder / LATEST).read_text()))
    return found


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_old_checkpoints_are_removed_and_nothing_else_is_left(keep_last: int, tmp_path: Path):
    steps = [1, 2, 3, 10, 100]
    (found,) = run_distributed(save_many, 1, tmp_path / CHECKPOINTS, keep_last, steps)
    for taken, (names, latest) in enumerate(found, start=1):
        kept = [f"step-{step:08d}" for step in steps[:taken][-keep_last:]]
        assert names == [LATEST, *kept] and latest == kept[-1]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `checkpoints` folder with steps 1 and 2 of two ranks."""
    folder = tmp_path_factory.mktemp("two") / CHECKPOINTS
    run_distributed(save_twice, 2, folder)
    return folder


def save_twice(rank: int, folder: Path) -> None:
    run = run_of(MODELS["moe"], 2, 2)
    engine = engine_of(run, rank)
    for step in (1, 2):
        save(folder, run, engine, progress=Progress(step, step, step))


def edit_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return edit


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


# file, what happens to it, what the error says
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": ("rank-00001.safetensors", cut, "bytes instead of"),
    "empty": ("rank-00000.safetensors", lambda path: path.write_bytes(b""), "has 0 bytes"),
    "longer": (
        "rank-00000.safetensors",
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        "bytes instead of",
    ),
    "edited": ("rank-00001.safetensors", edit_middle, "changed"),
    "missing": ("rank-00001.safetensors", Path.unlink, "missing"),
    "no manifest": ("manifest.json", Path.unlink, "cannot be read"),
    "torn manifest": ("manifest.json", cut, "cannot be read"),
    "binary manifest": (
        "manifest.json",
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        "cannot be read",
    ),
    "newer format": ("manifest.json", edit_manifest(lambda m: m.update(format=4)), "format 4"),
    "older format": (
        "manifest.json",
        edit_manifest(lambda m: m.update(format=2)),
        "has format 2, this version reads format 3",
    ),
    "oldest format": ("manifest.json", edit_manifest(lambda m: m.update(format=1)), "has format 1"),
    "no format": ("manifest.json", lambda path: path.write_text("{}"), "format None"),
}
INCOMPLETE: dict[str, Callable[[Path], object]] = {
    "a list": lambda path: path.write_text("[]"),
    **{
        f"no {key}": edit_manifest(lambda m, key=key: m.pop(key))
        for key in ("files", "config", "step", "updates", "tokens")
    },
    "no size": edit_manifest(lambda m: m["files"]["rank-00000.safetensors"].pop("bytes")),
    "no files at all": edit_manifest(lambda m: m["files"].clear()),
}


def refusal(
    folder: Path, tmp_path: Path, file: str, damage: Callable[[Path], object], step: int = 2
) -> ConfigError:
    """How the damaged checkpoint is refused."""
    path = shutil.copytree(folder, tmp_path / CHECKPOINTS) / f"step-{step:08d}"
    damage(path / file)
    with pytest.raises(ConfigError) as caught:
        verify_checkpoint(path)
    assert (
        caught.value.key == "resume"
        and str(path) in str(caught.value)
        and file in caught.value.rule
    )
    return caught.value


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_offered(
    damage: str, two_checkpoints: Path, tmp_path: Path
):
    file, apply, says = DAMAGES[damage]
    error = refusal(two_checkpoints, tmp_path, file, damage=apply)
    assert says in error.rule and error.nearest == tmp_path / CHECKPOINTS / "step-00000001"


@pytest.mark.parametrize("damage", INCOMPLETE)
def test_an_incomplete_manifest_is_refused(damage: str, two_checkpoints: Path, tmp_path: Path):
    assert (
        refusal(two_checkpoints, tmp_path, "manifest.json", damage=INCOMPLETE[damage]).nearest
        is not None
    )


def test_oldest_checkpoint_suggests_no_earlier_one(two_checkpoints: Path, tmp_path: Path):
    assert (
        refusal(
            two_checkpoints, tmp_path, "rank-00000.safetensors", damage=Path.unlink, step=1
        ).nearest
        is None
    )


def test_a_whole_checkpoint_is_not_refused(two_checkpoints: Path):
    for step in (1, 2):
        assert verify_checkpoint(two_checkpoints / f"step-{step:08d}")["step"] == step


OTHER_MODELS = {
    "model.hidden_size": (dataclasses.replace(TINY, hidden_size=64), 64, 32),
    "model.qk_norm": (dataclasses.replace(TINY, qk_norm=True), True, False),
    "model.moe.top_k": (
        dataclasses.replace(TINY, moe=dataclasses.replace(TINY_MOE, top_k=3)),
        3,
        2,
    ),
    "model.moe": (dataclasses.replace(TINY, moe=None), None, None),
}


@pytest.mark.parametrize("key", OTHER_MODELS)
def test_another_model_is_refused_by_the_key_that_differs(key: str, two_checkpoints: Path):
    model, current, saved_value = OTHER_MODELS[key]
    path = two_checkpoints / "step-00000002"
    with pytest.raises(ConfigError) as caught:
        find_start(dataclasses.replace(run_of(MODELS["moe"]), model=model, resume=str(path)))
    assert (
        caught.value.key == key and caught.value.value == current and str(path) in str(caught.value)
    )
    if saved_value is not None:
        assert [each.candidates for each in caught.value.alternatives] == [(saved_value,)]


OTHER_RUNS = {
    "train.seq_len": {"train": {"seq_len": 32}},
    "train.seed": {"train": {"seed": 7}},
    "data.source": {"data": {"source": Source.text, "path": "x"}},
    "data.document_mask": {"data": {"document_mask": True}},
    "precision.params": {"precision": {"params": Dtype.bfloat16}},
}


def other_run(changes: dict[str, dict[str, Any]], path: Path) -> Run:
    run = dataclasses.replace(run_of(MODELS["moe"]), resume=str(path))
    sections = {
        name: dataclasses.replace(getattr(run, name), **fields) for name, fields in changes.items()
    }
    return dataclasses.replace(run, **sections)


@pytest.mark.parametrize("key", OTHER_RUNS)
def test_other_data_is_refused(key: str, two_checkpoints: Path):
    with pytest.raises(ConfigError) as caught:
        find_start(other_run(OTHER_RUNS[key], two_checkpoints / "step-00000002"))
    assert caught.value.key == key


def test_changed_settings_are_reported(two_checkpoints: Path):
    run = other_run(
        {"optim": {"lr": 0.5}, "train": {"steps": 99}, "log": {"interval": 3}},
        two_checkpoints / "step-00000002",
    )
    assert find_start(run).changes == (
        "parallel.dp: 2 -> 1",
        "parallel.ep: 2 -> 1",
        "optim.lr: 0.01 -> 0.5",
        "log.interval: 10 -> 3",
        "train.steps: 20 -> 99",
    )


def test_an_older_checkpoint_branches_off(two_checkpoints: Path):
    """Later checkpoints stay: only the newest resumes in its own folder."""
    assert (
        find_start(other_run({}, two_checkpoints / "step-00000002")).run_dir
        == two_checkpoints.parent
    )
    assert find_start(other_run({}, two_checkpoints / "step-00000001")).run_dir is None
