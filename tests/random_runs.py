"""Legal runs of small models, drawn by a seed: any layout, order and recomputation the rules take.

A run is drawn as overrides of train.py, and its text is the command line: a failing case is one
line.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.advice.moves import Value
from app.advice.suggest import typed
from app.choices import (
    Balance,
    CpComm,
    Device,
    DispatcherKind,
    DropPolicy,
    Dtype,
    GraphImpl,
    GraphKey,
    GraphScope,
    Normalize,
    Recompute,
    ScheduleName,
    Score,
)
from app.cli.options.compose import load_overrides
from app.config import CudaGraphConfig, ParallelConfig, RecomputeConfig, Run, ScheduleConfig
from app.errors import ConfigError
from app.plan.layout import AXES
from app.rules import check

TRIES = 3000  # layouts of one model until the rules take one
Values = dict[str, Value]
# AdamW's eps is above the rounding of gradients, which would otherwise become whole updates.
ALL: Values = {
    "model.hidden_size": 32,
    "model.ffn_hidden_size": 48,
    "model.num_heads": 8,
    "model.num_kv_heads": 4,
    "train.seq_len": 32,
    "train.device": Device.cpu,
    "optim.lr": 1e-3,
    "optim.eps": 1e-5,
    "optim.warmup_steps": 2,
}


@dataclass(frozen=True)
class Drawn:
    """A run, and what it is typed as."""

    model: str  # option of the config group
    values: Values
    run: Run

    def __str__(self) -> str:
        words = (f"{key}={_quoted(value)}" for key, value in self.values.items())
        return f"python train.py {shlex.join([f'model={self.model}', *words])}"

    def with_values(self, values: Values) -> Drawn:
        """Return the run with other values. Raises ConfigError."""
        return drawn(self.model, self.values | values)

    def alone(self) -> Run:
        """Return the same training on one process, without options that must not change its
        numbers.
        """
        plain = {
            "parallel": ParallelConfig(),
            "schedule": ScheduleConfig(),
            "recompute": RecomputeConfig(),
            "cuda_graph": CudaGraphConfig(),
        }
        return check(dataclasses.replace(self.run, **plain))


def _quoted(value: Value) -> str:
    return f"'{value}'" if isinstance(value, str) and "|" in value else typed(value)


def drawn(model: str, values: Values) -> Drawn:
    """The run of these values. Raises ConfigError."""
    return Drawn(model, values, check(_applied(base(model), values)))


@functools.cache
def base(model: str) -> Run:
    """Return the run whose values are replaced."""
    return load_overrides((f"model={model}",))


def _applied(section: Any, values: Mapping[str, Value]) -> Any:
    """A section with some dotted keys changed, all at once: alone, one may not be legal."""
    inner: dict[str, dict[str, Value]] = {}
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            changes[name] = value
    changes |= {name: _applied(getattr(section, name), part) for name, part in inner.items()}
    return dataclasses.replace(section, **changes)


def random_run(seed: int, largest: int = 4, wild: bool = False, graphs: bool = False) -> Drawn:
    """A legal run of at most `largest` ranks.

    `wild`: also with what gives other numbers on other layouts, such as capacities and noise.
    `graphs`: something is captured.
    """
    draw = random.Random(seed)
    for _ in range(TRIES):
        moe = draw.random() < 0.6
        values = ALL | _model(draw) | _steps(draw) | (_moe(draw, wild) if moe else {})
        values |= _precision(draw) if wild else {}
        try:
            return _laid_out(
                draw, drawn("moe_tiny" if moe else "dense_tiny", values), largest, graphs=graphs
            )
        except ConfigError:
            continue
    raise AssertionError(f"seed {seed}: nothing legal")


def another_layout(seed: int, run: Drawn, largest: int = 4) -> Drawn:
    """Return the same model and steps in another layout."""
    same = ("model.", "train.", "loss.", "precision.", "optim.clip_norm", *ALL)
    values = {key: value for key, value in run.values.items() if key.startswith(same)}
    return _laid_out(random.Random(seed), drawn(run.model, values), largest, graphs=False)


def _laid_out(draw: random.Random, run: Drawn, largest: int, graphs: bool) -> Drawn:
    for _ in range(TRIES):
        values = _parallel(draw, run.run) | _optim(draw) | _recompute(draw)
        values |= _graphs(draw) if graphs else {}
        try:
            found = run.with_values(values)
        except ConfigError:
            continue
        if found.run.world_size <= largest:
            return found
    raise ConfigError("parallel", "", "nothing legal")


def _model(draw: random.Random) -> Values:
    return {
        "model.num_layers": draw.choice((1, 2, 3, 4, 4, 6)),
        "model.tie_embeddings": draw.random() < 0.5,
        "model.qk_norm": draw.random() < 0.5,
        "model.head_dim": draw.choice((None, None, 8)),
        "model.qkv_bias": draw.random() < 0.3,
        "model.sliding_window": draw.choice((None, None, 5)),
    }


def _steps(draw: random.Random) -> Values:
    size, count = draw.choice((1, 2)), draw.choice((2, 4, 4, 6, 8))
    return {
        "train.micro_batch": size,
        "train.global_batch": size * count,
        "loss.normalize": draw.choice(list(Normalize)),
        "loss.chunk_tokens": draw.choice((None, None, 7, 16)),
        "optim.clip_norm": draw.choice((0.0, 1.0)),
    }


def _moe(draw: random.Random, wild: bool) -> Values:
    shared = draw.choice((0, 16))
    score = draw.choice(list(Score))
    groups = draw.choice((None, None, 2, 4))
    values: Values = {
        "num_experts": draw.choice((4, 8)),
        "top_k": draw.choice((1, 2, 2, 3)),
        "ffn_hidden_size": 16,
        "first_k_dense": draw.choice((0, 0, 1)),
        "every_n": draw.choice((1, 1, 2)),
        "shared_ffn_hidden_size": shared,
        "shared_gate": bool(shared) and draw.random() < 0.5,
        "score": score,
        "pre_softmax": draw.random() < 0.3,
        "groups": groups,
        "topk_groups": None if groups is None else draw.choice((1, 2)),
        "routed_scale": draw.choice((None, 1.5)),
        "aux_loss_coeff": draw.choice((0.0, 0.01)),
        "balance": draw.choice((Balance.microbatch, Balance.sequence)),
        "z_loss_coeff": draw.choice((0.0, 0.001)),
        "bias_update_rate": draw.choice((0.0, 0.01)) if score is Score.sigmoid else 0.0,
        "dispatcher": draw.choice(list(DispatcherKind)),
    }
    if wild:
        factor = draw.choice((None, 0.7, 1.0, 2.0))
        values |= {
            "balance": draw.choice(list(Balance)),
            "capacity_factor": factor,
            "pad_to_capacity": factor is not None and draw.random() < 0.5,
            "drop_policy": draw.choice(list(DropPolicy)) if factor else DropPolicy.probs,
            "jitter_eps": draw.choice((0.0, 0.0, 0.1)),
            "force_balance": draw.random() < 0.1,
            "shared_overlap": bool(shared) and draw.random() < 0.3,
        }
    return {f"model.moe.{name}": value for name, value in values.items()}


def _precision(draw: random.Random) -> Values:
    params = draw.choice((Dtype.float32, Dtype.float32, Dtype.bfloat16, Dtype.float16))
    return {"precision.params": params, "precision.grads": draw.choice((Dtype.float32, params))}


def _parallel(draw: random.Random, run: Run) -> Values:
    axes = list(AXES)
    draw.shuffle(axes)
    pp = draw.choice((1, 2, 2, 3, 4))
    values: Values = {
        "tp": draw.choice((1, 1, 2, 4)),
        "cp": draw.choice((1, 1, 2, 4)),
        "pp": pp,
        "dp": draw.choice((1, 1, 2, 4)),
        "cp_comm_type": draw.choice(list(CpComm)),
        "order": "-".join(axes) if draw.random() < 0.5 else "-".join(AXES),
    }
    if run.model.moe:
        values |= {"ep": draw.choice((1, 2, 4)), "etp": draw.choice((None, 1, 2))}
    if pp > 1:
        values |= _stages(draw, run.model.num_layers, pp)
    found = {f"parallel.{name}": value for name, value in values.items()}
    return found | {
        "schedule.name": draw.choice(list(ScheduleName)),
        "schedule.group_size": draw.choice((None, None, 2, 3, 4)),
        "schedule.overlap_p2p": draw.random() < 0.7,
        "schedule.batch_p2p": draw.random() < 0.7,
    }


def _stages(draw: random.Random, layers: int, pp: int) -> Values:
    """How the layers lie: evenly, with other numbers at the ends, or as written, some empty."""
    kind = draw.choice(("even", "ends", "written"))
    if kind == "even":
        counted = {name: draw.random() < 0.3 for name in ("count_embedding", "count_head")}
        return {"vpp": draw.choice((1, 2, 3)), **counted}
    if kind == "ends":
        ends = {name: draw.choice((None, *range(1, layers + 1))) for name in ("first", "last")}
        return {"vpp": draw.choice((1, 2)), **ends}
    stages = pp * draw.choice((1, 2))
    cuts = sorted(draw.randint(0, layers) for _ in range(stages - 1))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    return {"layout": f"E{'|'.join('t' * size for size in sizes)}L"}


def _optim(draw: random.Random) -> Values:
    return {
        "optim.bucket_numel": draw.choice((None, 500, 1500)),
        "optim.overlap_grads": draw.random() < 0.7,
        "optim.overlap_params": draw.random() < 0.7,
    }


def _recompute(draw: random.Random) -> Values:
    kind, parts = draw.choice(("none", "phases", "full", "partial")), list(Recompute)
    phases = tuple(part for part in parts if draw.random() < 0.4) if kind != "none" else ()
    full = kind in ("full", "partial")
    return {
        "recompute.full": full,
        "recompute.phases": phases if kind != "full" else (),
        "recompute.partial_microbatches": draw.choice((1, 2)) if kind == "partial" else 0,
    }


def _graphs(draw: random.Random) -> Values:
    impl = draw.choice((GraphImpl.local, GraphImpl.local, GraphImpl.full_iteration))
    scope = tuple(part for part in GraphScope if draw.random() < 0.5)
    return {
        "cuda_graph.impl": impl,
        "cuda_graph.scope": scope if impl is GraphImpl.local else (),
        "cuda_graph.warmup_steps": 2,
        "cuda_graph.key": draw.choice(list(GraphKey)),
        "cuda_graph.optimizer": impl is GraphImpl.full_iteration and draw.random() < 0.5,
    }
