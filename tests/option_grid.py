"""Pairs of options: runs that together have every pair of values that the rules accept.

Options and their values come from app/config: both values of a boolean, every member of an enum,
subsets of a tuple of members. Numbers and texts have no such list, so `NUMBERS` gives the values
that choose between code paths, `FIXED` what all runs share, and `LEFT_OUT` what no step reads. A
new key of another type has to be added to one of them (`options_of` raises LookupError).

Constraints come from the program: a value, pair or run is refused where building its `Run`,
`app.rules.check` or the plan raises ConfigError. Any other exception is a fault.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import torch
import yaml

from app.advice.suggest import typed
from app.choices import Device
from app.config import CudaGraphConfig, Run
from app.engine.run.host import check_host
from app.errors import ConfigError
from app.rules import RULES

CONF = Path(__file__).parent.parent / "conf"
CPU = torch.device("cpu")
VALUE_ATTEMPTS = 9  # a value that seems refused is in no run of a grid
STARTS = 4  # runs with one value of a pair that a search for the pair begins from
ON = "on"  # of an optional section: it is there
Value = Any
Values = dict[str, Value]  # by dotted key; without the keys of sections that are not there
Item = tuple[str, Value]
Pair = frozenset[Item]

FIXED: Values = {
    # tiny, and multiples of 16 as FP8 takes them
    "model.hidden_size": 32,
    "model.ffn_hidden_size": 64,
    "model.num_heads": 4,
    "model.vocab_size": 64,
    "model.mla.kv_lora_rank": 16,
    "model.mla.qk_nope_head_dim": 16,
    "model.mla.qk_rope_head_dim": 16,
    "model.mla.v_head_dim": 16,
    "model.linear_attention.key_heads": 2,
    "model.linear_attention.value_heads": 4,
    "model.linear_attention.key_head_dim": 16,
    "model.linear_attention.value_head_dim": 16,
    "model.moe.num_experts": 8,
    "model.moe.ffn_hidden_size": 32,
    "model.yarn.original_length": 8,
    "model.llama3_rope.original_length": 8,
    "model.longrope.original_length": 8,
    "model.dynamic_rope.original_length": 8,
    "train.steps": 20,
    "train.seq_len": 16,
    "train.global_batch": 4,
    "train.eval_sequences": 4,
    "train.device": Device.cpu,
    "optim.lr": 1e-2,
}
NUMBERS: dict[str, tuple[Value, ...]] = {
    "train.replay_every": (None, 1),
    "model.num_layers": (2, 3),
    "model.num_kv_heads": (2, 4),
    "model.head_dim": (None, 16),
    "model.rotary_dim": (None, 4),
    "model.sliding_window": (None, 5),
    "model.no_rope_layers": ((), (1, 0)),
    "model.local_rope_theta": (None, 1e3),
    "model.query_pre_attn_scalar": (None, 24.0),
    "model.attention_softcap": (None, 2.0),
    "model.embedding_scale": (None, 6.0),
    "model.residual_scale": (None, 0.3),
    "model.logit_scale": (None, 0.5),
    "model.logit_softcap": (None, 3.0),
    "model.mla.q_lora_rank": (None, 32),
    "model.moe.top_k": (2, 1),
    "model.moe.every_n": (1, 2),
    "model.moe.first_k_dense": (0, 1),
    "model.moe.dense_layers": ((), (0,)),
    "model.moe.shared_ffn_hidden_size": (0, 32),
    "model.moe.groups": (None, 4),
    "model.moe.topk_groups": (None, 2),
    "model.moe.group_best": (None, 1),
    "model.moe.routed_scale": (None, 1.5),
    "model.moe.swiglu_limit": (None, 0.5),
    "model.moe.swiglu_alpha": (None, 1.0),
    "model.moe.capacity_factor": (None, 0.7),
    "model.moe.aux_loss_coeff": (0.01, 0.0),
    "model.moe.z_loss_coeff": (0.0, 0.001),
    "model.moe.bias_update_rate": (0.0, 0.01),
    "model.moe.jitter_eps": (0.0, 0.1),
    "model.mtp.layers": (0, 1),
    "model.mtp.loss_weight": (0.1, 1.0),
    "model.moe.static.factor": (1.5, 1.0),
    "model.moe.static.paged_buffer": (None, 2.0),
    "model.moe.echo.spares": (0, 1),
    "model.moe.echo.threshold": (0.05, 0.0),
    "schedule.group_size": (None, 2),
    "recompute.partial_microbatches": (0, 1),
    "cuda_graph.warmup_steps": (1, 2),
    "precision.loss_scale": (None, 128.0),
    "precision.fp8.first_layers": (0, 1),
    "precision.fp8.last_layers": (0, 1),
    "precision.fp8.amax_history": (16, 1),
    "precision.fp8.margin": (0, 1),
    "optim.warmup_steps": (None, 1),
    "optim.decay_steps": (None, 10),
    "optim.wsd_decay_steps": (None, 2),
    "optim.weight_decay": (0.1, 0.0),
    "optim.clip_norm": (1.0, 0.0),
    "optim.bucket_numel": (None, 1500),
    "loss.chunk_tokens": (None, 7),
    "train.micro_batch": (2, 1),
    "train.frozen": ((), ("embedding", "layers.0")),
    "lora.rank": (None, 4),
    "lora.targets": ((), ("self_attn",)),
    "lora.dropout": (0.0, 0.25),
}
# of several ranks
DEGREES: dict[str, tuple[Value, ...]] = {
    "model.num_layers": (4, 2),  # four stages with pp=2 and vpp=2
    "parallel.tp": (1, 2),
    "parallel.cp": (1, 2),
    "parallel.pp": (1, 2),
    "parallel.ep": (1, 2),
    "parallel.etp": (None, 1, 2),
    "parallel.order": ("tp-cp-ep-dp-pp", "pp-dp-ep-cp-tp"),
    "parallel.vpp": (1, 2),
    "parallel.first": (None, 1),
    "parallel.last": (None, 2),
    "parallel.layout": (None, "Et|tL"),
    "parallel.gpus_per_node": (8, 1),
}
SIZE = "a size or factor that chooses between no code paths"
HOST = "read by the host around steps, not by a step"
LEFT_OUT = {
    "checkpoint": HOST,
    "log": HOST,
    "hardware": "what plans are made for",
    "sweep": HOST,
    "run_dir": HOST,
    "resume": HOST,
    "model.name": HOST,
    "lora.alpha": SIZE,
    "lora.base": "needs wide matrices, see test_held_base.py",
    "lora.init_from": "read before the first step, see test_adapter_files.py",
    "model.init_from": "pretrained weights, see test_hub_models.py and test_init_from.py",
    "model.rope_theta": SIZE,
    "model.linear_rope_factor": SIZE,
    "model.norm_eps": SIZE,
    "model.mla.norm_eps": SIZE,
    "model.linear_attention.conv_width": SIZE,
    "model.init_std": SIZE,
    "model.yarn.factor": SIZE,
    "model.yarn.beta_fast": SIZE,
    "model.yarn.beta_slow": SIZE,
    "model.yarn.mscale": SIZE,
    "model.yarn.mscale_all_dim": SIZE,
    "model.yarn.attention_factor": SIZE,
    "model.llama3_rope.factor": SIZE,
    "model.llama3_rope.low_turns": SIZE,
    "model.llama3_rope.high_turns": SIZE,
    "model.longrope.short_factors": SIZE,
    "model.longrope.long_factors": SIZE,
    "model.longrope.factor": SIZE,
    "model.longrope.attention_factor": SIZE,
    "model.dynamic_rope.factor": SIZE,
    "model.moe.planned_imbalance": "read by plans alone",
    "parallel.world_size": "the grid's number of ranks",
    "parallel.dp": "what the other degrees leave of the ranks",
    "schedule.timeout_s": HOST,
    "precision.initial_loss_scale": SIZE,
    "precision.min_loss_scale": SIZE,
    "precision.loss_scale_window": SIZE,
    "precision.loss_scale_hysteresis": SIZE,
    "optim.min_lr": SIZE,
    "optim.beta1": SIZE,
    "optim.beta2": SIZE,
    "optim.eps": SIZE,
    "optim.muon.momentum": SIZE,
    "data.sources": HOST,
    "data.source": HOST,
    "data.path": HOST,
    "data.name": HOST,
    "data.config_name": HOST,
    "data.split": HOST,
    "data.streaming": HOST,
    "data.text_field": HOST,
    "data.chat_template": HOST,
    "data.truncate": "of conversations; tests/data/test_truncate.py",
    "data.tokenizer": HOST,
    "data.validation": HOST,
    "data.validation_fraction": HOST,
    "data.validation_documents": HOST,
    "data.max_documents": "packs sequences; tests/data/test_packing.py",
    "data.packing": "packs sequences; tests/data/test_best_fit.py",
    "data.num_proc": HOST,
    "data.cache_dir": HOST,
    "data.accept_changed": HOST,
    "parallel.elastic": "of a launcher of other ranks; tests/plan/test_elastic.py",
    "parallel.replaced": "set by parallel.elastic",
    "train.eval_interval": HOST,
    "train.stop_after_worse": HOST,
    "train.tokens": HOST,
    "train.epochs": HOST,
    "train.sample_tokens": HOST,
    "train.on_bad_step": HOST,
    "train.max_bad_steps": HOST,
    "train.max_rollbacks": HOST,
    "train.on_corruption": HOST,
    "train.profile": "records three steps; tests/processes/test_profiled_steps.py",
    "train.seed": SIZE,
}


def _on_cpu(run: Run) -> None:
    """Check the run's demands on the host, except for graph capture, which tests replace."""
    check_host(dataclasses.replace(run, cuda_graph=CudaGraphConfig()), CPU)


CHECKS = (*RULES, _on_cpu)


@dataclass(frozen=True)
class Options:
    """Every option of the grid with its values, the default or tiny one first."""

    ranks: int
    values: dict[str, tuple[Value, ...]]  # by dotted key
    under: dict[str, tuple[str, ...]]  # by key: optional sections that it lies in

    def there(self, key: str, chosen: Mapping[str, Value]) -> bool:
        """Return whether the sections of a key are set."""
        return all(chosen.get(section) is ON for section in self.under[key])

    def present(self, chosen: Values) -> Values:
        """The values of keys whose sections are there."""
        absent = {section for sections in self.under.values() for section in sections
                  if chosen.get(section) is not ON}  # fmt: skip
        return {key: value for key, value in chosen.items() if absent.isdisjoint(self.under[key])}

    def completed(self, chosen: Values) -> Values:
        """`chosen`, with its optional sections there, and first values for all other keys."""
        first = {key: values[0] for key, values in self.values.items()}
        sections = {section: ON for key in chosen for section in self.under[key]}
        return first | sections | chosen

    def run(self, chosen: Values) -> Run:
        """The run of these values, not yet checked. ConfigError where a section refuses it."""
        world = {"parallel.world_size": self.ranks} if self.ranks > 1 else {}
        run: Run = _built(Run, {**FIXED, **world, **self.present(chosen)})
        return run

    def refusal(self, chosen: Values) -> Refusal | None:
        """Why the program does not take these values on a CPU; None: it does."""
        passed = -1
        try:
            run = self.run(chosen)
            for rule in CHECKS:
                passed += 1
                rule(run)
        except ConfigError as error:
            return Refusal(error, passed)
        return None

    def pairs(self) -> Iterator[Pair]:
        """Every pair of values of two options that can be there together."""
        for (one, ones), (other, others) in itertools.combinations(self.values.items(), 2):
            inside, around = one in self.under[other], other in self.under[one]
            for a, b in itertools.product(ones, others):
                if not ((inside and a is None) or (around and b is None)):
                    yield frozenset(((one, a), (other, b)))


def options_of(ranks: int) -> Options:
    """The options of runs with this many ranks. LookupError for a key without values."""
    values: dict[str, tuple[Value, ...]] = {}
    under: dict[str, tuple[str, ...]] = {}
    known = NUMBERS | (DEGREES if ranks > 1 else {})
    unread = {**LEFT_OUT, **({} if ranks > 1 else {"parallel": "of several ranks"})}
    for key, each, sections in _keys(Run, "", ()):
        names = (key, key.partition(".")[0])
        if key in FIXED or any(name in unread for name in names):
            continue
        values[key] = known[key] if key in known else _members(key, each)
        under[key] = sections
    return Options(ranks, values, under)


@dataclass(frozen=True, slots=True)
class _Field:
    """One key of a section."""

    name: str
    hint: Any
    default: Value
    section: type | None  # what it holds, if that is a section
    optional: bool  # that may be null


@functools.cache
def _fields(section: type) -> tuple[_Field, ...]:
    hints, found = typing.get_type_hints(section), []
    for each in dataclasses.fields(section):
        hint = hints[each.name]
        kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
        inner = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        default = None if each.default is dataclasses.MISSING else each.default
        found.append(_Field(each.name, hint, default, inner, optional=NoneType in kinds))
    return tuple(found)


def _keys(
    section: type, prefix: str, under: tuple[str, ...]
) -> Iterator[tuple[str, _Field, tuple[str, ...]]]:
    """Every key that is no section or an optional one, and the optional sections around it."""
    for each in _fields(section):
        key = f"{prefix}{each.name}"
        if each.section is None or each.optional:
            yield key, each, under
        if each.section is not None:
            yield from _keys(each.section, f"{key}.", (*under, key) if each.optional else under)


def _members(key: str, each: _Field) -> tuple[Value, ...]:
    """All values of a type that has few, the default first."""
    if each.section is not None:
        return None, ON
    found: list[Value] = [None] if each.optional else []
    for kind in typing.get_args(each.hint) if isinstance(each.hint, UnionType) else (each.hint,):
        if kind is bool:
            found += [False, True]
        elif isinstance(kind, type) and issubclass(kind, Enum):
            found += kind
        elif typing.get_origin(kind) is tuple and issubclass(typing.get_args(kind)[0], Enum):
            found += _subsets(key, typing.get_args(kind)[0])
        elif kind is not NoneType:
            raise LookupError(f"{key}: NUMBERS, FIXED or LEFT_OUT of {__name__} has to name it")
    return tuple(sorted(found, key=lambda value: value != each.default))


def _subsets(key: str, kind: type[Enum]) -> Iterator[tuple[Enum, ...]]:
    """None, one or all of the members, and what the config group of the section offers."""
    section, _, name = key.rpartition(".")
    offered = [yaml.safe_load(path.read_text()) for path in sorted((CONF / section).glob("*.yaml"))]
    listed = [option[name] for option in offered if isinstance(option.get(name), list)]
    named = [tuple(map(kind, each)) for each in listed]
    all_found = ((), *((member,) for member in kind), tuple(kind), *named)
    yield from dict.fromkeys(all_found)


def _built(section: type, values: Values) -> Any:
    """A section from dotted keys; what they lack has its default."""
    parts: defaultdict[str, Values] = defaultdict(dict)
    for key, value in values.items():
        name, _, rest = key.partition(".")
        parts[name][rest] = value
    given = {}
    for each in _fields(section):
        of_key = parts[each.name]
        if each.section is None:
            if of_key:
                given[each.name] = of_key[""]
        elif not each.optional or of_key.pop("", None) is ON:
            given[each.name] = _section(each.section, frozenset(of_key.items()))
    return section(**given)


@functools.lru_cache(4096)  # a search changes one section after the other
def _section(section: type, values: frozenset[Item]) -> Any:
    return _built(section, dict(values))


def command(chosen: Values, ranks: int) -> str:
    """Values that are not the first ones, as one may read them."""
    first = options_of(ranks).values
    return " ".join(
        f"{key}={typed(value)}" for key, value in sorted(chosen.items()) if value != first[key][0]
    )


@dataclass(frozen=True)
class Refusal:
    """Why the program does not take some values."""

    error: ConfigError
    passed: int  # rules that came before and take them; -1: sections refuse them by themselves

    @property
    def rule(self) -> tuple[str, str]:
        """Return key and rule of a refusal, with numbers masked."""
        return self.error.key, re.sub(r"\d+", "#", self.error.rule)


class Reach(Enum):
    """Which keys a search changes to have values accepted."""

    near = "near"  # the refused one, or one that the message names
    all = "all"  # then others
    at_once = "at_once"  # all of them alike


@dataclass
class Search:
    """Finds accepted runs with given values by changing others."""

    options: Options
    draw: random.Random

    def repaired(
        self, chosen: Values, keep: set[str], tries: int, *, reach: Reach = Reach.all
    ) -> Values | Refusal:
        """Accepted values that are as `chosen` for the keys in `keep`; else the first refusal.

        Each change of another key lets the program accept the values, or brings them to another
        refusal that is no earlier in its checks.
        """
        seen: set[tuple[str, str]] = set()
        first = None
        while (refusal := self.options.refusal(chosen)) is not None:
            first = first or refusal
            seen.add(refusal.rule)
            free = [
                key
                for key in self.options.values
                if key not in keep and self.options.there(key, chosen)
            ]
            near = _by_nearness(free, refusal.error)
            if reach is not Reach.all:
                near = near[:-1] if reach is Reach.near else [free]
            found = self._changed(chosen, near, refusal, seen) if len(seen) <= tries else None
            if found is None:
                return first
            chosen = found
        return chosen

    def _changed(
        self,
        chosen: Values,
        keys: Sequence[Sequence[str]],
        refusal: Refusal,
        seen: set[tuple[str, str]],
    ) -> Values | None:
        """Change one of the first `keys` that help, else one of the next."""
        for near in keys:
            found, furthest = None, refusal.passed - 1
            for key, value in self._others(chosen, near):
                changed = chosen | {key: value}
                now = self.options.refusal(changed)
                if now is None:
                    return changed
                if now.passed > furthest and now.rule not in seen:
                    found, furthest = changed, now.passed
            if found is not None:
                return found
        return None

    def _others(self, chosen: Values, keys: Sequence[str]) -> Iterator[Item]:
        """Other values of some keys, in random order."""
        for key in self.draw.sample(keys, len(keys)):
            for value in self.draw.sample(self.options.values[key], len(self.options.values[key])):
                if value != chosen[key]:
                    yield key, value

    def accepted(self, given: Values, *, attempts: int = 1) -> Values | Refusal:
        """Accepted values that include `given`, near to the defaults; else the first refusal.

        The search changes one key after the other at random, and may miss what needs several: more
        `attempts` find more.
        """
        start = self.options.completed(given)
        keep = {*given, *(section for key in given for section in self.options.under[key])}
        found = self.repaired(start, keep, tries=12)
        for _ in range(attempts):
            if isinstance(found, Refusal):
                found = self.repaired(start, keep, tries=12, reach=Reach.at_once)
        return found


def _by_nearness(keys: Sequence[str], error: ConfigError) -> list[list[str]]:
    """The refused key, those that the message names, the others."""
    words = set(re.findall(r"\w+", str(error)))
    refused = [key for key in keys if key == error.key]
    named = [key for key in keys if key.rpartition(".")[2] in words and key not in refused]
    return [refused, named, [key for key in keys if key not in (*refused, *named)]]


class Grid:
    """Runs drawn one after the other, each with as many new pairs as are found.

    Values for which `attempts` searches find no run are left out.
    """

    def __init__(self, ranks: int, seed: int, *, attempts: int = VALUE_ATTEMPTS) -> None:
        self.draw = random.Random(seed)
        options = options_of(ranks)
        search = Search(options, self.draw)
        single = {
            (key, value): search.accepted({key: value}, attempts=attempts)
            for key, values in options.values.items()
            for value in values
        }
        self.refused_values = {
            item: refusal for item, refusal in single.items() if isinstance(refusal, Refusal)
        }
        kept = {
            key: tuple(value for value in values if (key, value) not in self.refused_values)
            for key, values in options.values.items()
        }
        self.options = dataclasses.replace(options, values=kept)
        self.search = Search(self.options, self.draw)
        self.uncovered = dict.fromkeys(self.options.pairs())  # in an order that a seed repeats
        self.size = len(self.uncovered)
        self.refused: dict[Pair, Refusal] = {}
        self.found: list[Values] = []  # of runs so far, also of keys whose sections are not there

    def __str__(self) -> str:
        values = sum(map(len, self.options.values.values()))
        return (
            f"{len(self.options.values)} options with {values} values, "
            f"{len(self.refused_values)} other values refused; {self.size} pairs, of which "
            f"{len(self.refused)} refused, {len(self.uncovered)} left"
        )

    def runs(self) -> Iterator[Values]:
        """Accepted values, until every pair is in some run or refused."""
        order = [*self.uncovered]
        self.draw.shuffle(order)
        for pair in order:
            if pair in self.uncovered:
                yield from self._with_pair(pair, self.search.accepted(dict(pair)))
        for pair in [*self.refused]:  # what needs several changes at once is in other runs already
            if pair in self.refused:
                yield from self._with_pair(pair, self._from_another_run(pair))

    def _with_pair(self, pair: Pair, found: Values | Refusal) -> Iterator[Values]:
        if isinstance(found, Refusal):
            self.refused.setdefault(pair, found)
            self.uncovered.pop(pair, None)
            return
        self.found.append(self._filled(found, {key for key, _ in pair}))
        present = self.options.present(self.found[-1])
        for each in map(frozenset, itertools.combinations(present.items(), 2)):
            self.uncovered.pop(each, None)
            self.refused.pop(each, None)
        yield present

    def _from_another_run(self, pair: Pair) -> Values | Refusal:
        """Start from runs that have one of the two values."""
        sections = {section: ON for key, _ in pair for section in self.options.under[key]}
        wanted = sections | dict(pair)
        for key, value in sorted(pair, key=repr):
            runs = [run for run in self.found if self.options.present(run).get(key) == value]
            for run in self.draw.sample(runs, min(len(runs), STARTS)):
                found = self.search.repaired(run | wanted, {*wanted}, tries=6, reach=Reach.near)
                if not isinstance(found, Refusal):
                    return found
        return self.refused[pair]

    def _filled(self, chosen: Values, keep: set[str]) -> Values:
        """Give every other key the value with most uncovered pairs, in random order."""
        options = self.options
        keep = keep | {section for key in keep for section in options.under[key]}
        sections = {section for under in options.under.values() for section in under}
        rest = [key for key in options.values if key not in keep]
        self.draw.shuffle(rest)
        for key in sorted(rest, key=lambda key: key not in sections):
            if not options.there(key, chosen):
                continue
            fixed = [(name, chosen[name]) for name in keep if options.there(name, chosen)]
            for value in sorted(options.values[key], key=partial(self._gain, sections, key, fixed)):
                found = self.search.repaired(
                    chosen | {key: value}, keep | {key}, tries=3, reach=Reach.near
                )
                if not isinstance(found, Refusal):
                    chosen = found
                    keep.add(key)
                    break
        return chosen

    def _gain(
        self, sections: set[str], key: str, fixed: Sequence[Item], value: Value
    ) -> tuple[int, float]:
        """Sort the value with most uncovered pairs first; sections are there or not by chance."""
        new = sum(frozenset(((key, value), item)) in self.uncovered for item in fixed)
        return 0 if key in sections else -new, self.draw.random()
