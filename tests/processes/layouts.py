"""Every way to lay a small model on a few ranks, and a small set of ways in which every two choices
meet.

The model and its sequences divide by all degrees up to 4.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from app.choices import CpComm, DispatcherKind, ScheduleName
from app.config import ModelConfig, ParallelConfig, Run, ScheduleConfig, TrainConfig
from app.errors import ConfigError
from tests.cases import covering
from tests.runs import STEADY, TINY_MOE, make_run

MOE = dataclasses.replace(TINY_MOE, shared_gate=True)
GRID = ModelConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=64,
    qk_norm=True,
    moe=MOE,
)
PLAIN = dataclasses.replace(
    GRID, moe=None, tie_embeddings=True, qkv_bias=True, qk_norm_whole=True, rotary_dim=2
)
MODELS = {"moe": GRID, "dense": PLAIN}
SEQUENCES, SEQ_LEN = 4, 32  # of a step
LARGEST = 8  # world

CHOICES: dict[str, tuple[Any, ...]] = {
    "model": ("dense", "moe"),
    "tp": (1, 2, 4),
    "cp": (1, 2, 4),
    "ep": (1, 2, 4),
    "etp": (1, 2),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "dp": (1, 2, 4),
    "schedule": ("none", "gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v"),
    "comm": ("all_gather", "all_to_all"),
    "dispatcher": ("auto", "all_gather", "static"),
}
Case = tuple[Any, ...]  # a value for each of the choices


def run_of(case: Case, **sections: Any) -> Run:
    """The run of a case; ConfigError where there is none."""
    chosen = dict(zip(CHOICES, case, strict=True))
    model = MODELS[chosen["model"]]
    if model.moe:
        model = dataclasses.replace(
            model,
            moe=dataclasses.replace(model.moe, dispatcher=DispatcherKind(chosen["dispatcher"])),
        )
    degrees = {name: chosen[name] for name in ("tp", "cp", "pp", "ep", "vpp", "dp")}
    etp = chosen["etp"] if model.moe else None
    parallel = ParallelConfig(**degrees, etp=etp, cp_comm_type=CpComm(chosen["comm"]))
    train = TrainConfig(steps=20, seq_len=SEQ_LEN, micro_batch=1, global_batch=SEQUENCES)
    order = ScheduleConfig(ScheduleName(chosen["schedule"]))
    optim = dataclasses.replace(STEADY, bucket_numel=1500)  # several buckets per chunk
    return make_run(
        model,
        **({"parallel": parallel, "schedule": order, "optim": optim, "train": train} | sections),
    )


def idle(case: Case) -> bool:
    """Return whether a choice has no effect beside the others, so that the case repeats another."""
    chosen = dict(zip(CHOICES, case, strict=True))
    dense = chosen["model"] == "dense" and (chosen["ep"], chosen["etp"], chosen["dispatcher"]) != (
        1,
        1,
        "auto",
    )
    alone = chosen["dispatcher"] != "auto" and chosen["ep"] * chosen["etp"] == 1
    return dense or alone or (chosen["comm"] == "all_to_all" and chosen["cp"] == 1)


def world(case: Case) -> int:
    """Ranks of a case."""
    chosen = dict(zip(CHOICES, case, strict=True))
    return chosen["tp"] * chosen["cp"] * chosen["pp"] * chosen["dp"]


def legal() -> Iterator[Case]:
    """Every case that the rules let through."""
    for case in itertools.product(*CHOICES.values()):
        if world(case) <= LARGEST and not idle(case):
            try:
                run_of(case)
            except ConfigError:
                continue
            yield case


def in_pairs() -> list[Case]:
    """Few of the cases, in which any two values meet that meet in any; least ranks first."""
    cases = sorted(legal(), key=world)
    return [cases[nth] for nth in covering([tuple(enumerate(case)) for case in cases], 2)]
