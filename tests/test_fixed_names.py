"""Names that other programs call: they stay where they are, with the arguments they have."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from app.cli.options.compose import load_overrides
from app.cli.options.keys import all_keys
from app.engine.step.records import RecoveryReport, RollbackReport, StepReport, ValidationReport
from app.planner.export import plan_json
from app.planner.plan import Plan

# module, name, arguments with their defaults as one writes them
NAMES = [
    (
        "app.plan.layout",
        "ParallelLayout",
        "world_size, tp=1, cp=1, pp=1, ep=1, etp=None, order='tp-cp-ep-dp-pp'",
    ),
    (
        "app.plan.stages",
        "plan_stages",
        "num_layers, pp, vpp=1, first=None, last=None, layout=None, count_embedding=False, "
        "count_head=False",
    ),
    (
        "app.plan.schedule",
        "build_schedule",
        "name, pp, num_microbatches, num_chunks=1, group_size=None, forward_only=False",
    ),
    (
        "app.plan.schedule",
        "warmup_count",
        "pp, pp_rank, num_microbatches, num_chunks=1, group_size=None, forward_only=False, "
        "moe_overlap=False",
    ),
    ("app.plan.schedule", "signed_order", "actions"),
    ("app.plan.graphs", "plan_graphs", "actions, num_layers_per_chunk, key='microbatch'"),
    (
        "app.plan.shards",
        "shard_map",
        "numels, world, rank, *, bucket_numel=None, param_align=1, shard_align=1",
    ),
    (
        "app.moe.router",
        "route",
        "logits_TE, top_k, score='softmax', pre_softmax=False, bias_E=None, groups=None, "
        "topk_groups=None, scale=None",
    ),
    (
        "app.moe.echo",
        "plan_clones",
        "counts_RE, spares_per_rank, algorithm='one_shot_greedy', threshold=0.0",
    ),
]
MEMBERS = [
    ("app.plan.layout", "ParallelLayout", ("dp", "edp", "groups")),
    ("app.plan.stages", "StagePlan", ("stages",)),
    ("app.plan.stages", "Stage", ("layers", "embedding", "head")),
    ("app.plan.graphs", "GraphPlan", ("num_graphs", "num_slots", "slot_of")),
    ("app.plan.shards", "Range", ("bucket", "world", "local", "param")),
]
# a plan that has all that plans may have
PLANNED = (
    "model=moe_tiny",
    "model.tie_embeddings=true",
    "parallel.world_size=16",
    "parallel.tp=2",
    "parallel.cp=2",
    "parallel.pp=2",
    "parallel.ep=2",
    "cuda_graph=partial",
)
PROGRAMS = ("convert", "evaluate", "generate", "plan", "report", "torchrun", "train")


def written(function: object) -> str:
    """Arguments as in NAMES: without annotations, of enums their values."""
    arguments = []
    for argument in inspect.signature(function).parameters.values():
        default = getattr(argument.default, "value", argument.default)
        has = argument.default is not inspect.Parameter.empty
        if argument.kind is argument.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        arguments.append(f"{argument.name}={default!r}" if has else argument.name)
    return ", ".join(arguments)


@pytest.mark.parametrize(("module", "name", "arguments"), NAMES)
def test_functions_stay(module: str, name: str, arguments: str):
    """More arguments may follow, with defaults."""
    found = written(getattr(import_module(module), name))
    assert found.startswith(arguments)
    assert all(
        "=" in more for more in found.removeprefix(arguments).strip(", ").split(", ") if more
    )


@pytest.mark.parametrize(("module", "name", "members"), MEMBERS)
def test_members_stay(module: str, name: str, members: tuple[str, ...]):
    known = getattr(import_module(module), name)
    fields = getattr(known, "__dataclass_fields__", getattr(known, "_fields", ()))
    assert [each for each in members if not hasattr(known, each) and each not in fields] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_stay(name: str):
    assert import_module("importlib.util").find_spec(f"app.cli.{name}") is not None


def key_paths(value: object, above: str = "") -> Iterator[str]:
    """Dotted keys of nested JSON; those of a list's elements behind []."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from key_paths(inside, f"{above}.{key}".removeprefix("."))
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for each in value:
            yield from key_paths(each, f"{above}[]")
    else:
        yield above


def keys_now() -> set[str]:
    """Every key that users type, or that programs read in what a run writes."""
    plan = Plan(load_overrides(PLANNED))
    reports = (StepReport, ValidationReport, RollbackReport, RecoveryReport)
    metrics = {field.name for report in reports for field in dataclasses.fields(report)}
    return {
        *(f"config {key}" for key in all_keys()),
        *(f"metrics.jsonl {key}" for key in metrics),
        *(f"plan.json {key}" for key in key_paths(plan_json(plan))),
        *(f"plan.json group {kind.name}" for kind in plan.traffic),
    }


def test_keys_stay():
    """New ones may come; tests/golden/checkpoint stands for those of checkpoints."""
    known = (Path(__file__).parent / "golden" / "keys.txt").read_text().splitlines()
    assert len(known) > 200
    assert sorted(set(known) - keys_now()) == []
