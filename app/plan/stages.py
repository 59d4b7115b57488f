"""Decoder layers, embedding and head of each pipeline stage.

Stages are numbered in the order in which a microbatch passes them: stage s is chunk s // pp of
pipeline rank s % pp, or of rank pp − 1 − s % pp for chunk 1 of a V.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from app.errors import ConfigError, FirstOf, Instead, nearest_divisors, nearest_multiples
from app.plan.dependencies import Pipeline

SPELLED = 4  # layers up to which a stage is written out, as ttt; more are written as t*5
# layer name -> letter of a layout
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@dataclass(frozen=True)
class Stage:
    """Decoder layers of one pipeline stage, and whether it holds embedding and head."""

    # decoder layers, from 0 over the whole model; on the last stage then those behind the decoder
    layers: tuple[int, ...]
    embedding: bool  # has the token embedding
    head: bool  # has the output layer and the loss


@dataclass(frozen=True)
class StagePlan:
    """Stages of a model; those of a rank are `stages[pp_rank]`."""

    stages: tuple[tuple[Stage, ...], ...]  # [pp_rank][chunk]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.stages)

    @property
    def pipeline(self) -> Pipeline:
        """Placement of stages on ranks; in a V the first rank has the last stage too."""
        return Pipeline(self.pp, self.vpp, self.pp > 1 and self.stages[0][-1].head)

    @property
    def in_order(self) -> tuple[Stage, ...]:
        """Stages in the order in which a microbatch passes them."""
        pipeline = self.pipeline
        return tuple(
            self.stages[pipeline.rank(stage)][stage // self.pp]
            for stage in range(pipeline.last + 1)
        )

    @property
    def vpp(self) -> int:
        """Stages per pipeline rank, that is its chunks."""
        return len(self.stages[0])


def plan_stages(
    num_layers: int,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    layout: str | Sequence[Sequence[str]] | None = None,
    count_embedding: bool = False,
    count_head: bool = False,
    v_shape: bool = False,
    behind: int = 0,
) -> StagePlan:
    """Split num_layers decoder layers over pp ranks with vpp stages each.

    By default every stage has equally many. `first` and `last` set the layers of the first and last
    pipeline rank, over all its stages; the rest is split evenly. count_embedding and count_head
    count the embedding, and the head with its loss, as one layer of the first and last stage.
    `layout` spells the stages out instead (see `parse_layout`) and sets vpp itself: vpp=1 then
    means unset. v_shape lays out the two stages of each rank in a V (see Pipeline): the first rank
    holds both embedding and head. The last stage has `behind` layers of multi-token prediction too.

    Raises ConfigError (a ValueError) for uneven splits, with the nearest that works.
    """
    for key, value in (
        ("model.num_layers", num_layers),
        ("parallel.pp", pp),
        ("parallel.vpp", vpp),
    ):
        if value < 1:
            raise ConfigError(key, value, "must be at least 1", nearest=1)
    if v_shape and vpp != 2 and (layout is None or vpp != 1):
        raise ConfigError("parallel.vpp", vpp, "stages in a V are two per pipeline rank", nearest=2)
    uneven = first is not None or last is not None
    counted = count_embedding or count_head
    if layout is not None:
        if uneven or counted:
            rule = (
                "spells out every stage, so first, last, count_embedding and count_head must "
                "be unset"
            )
            raise ConfigError("parallel.layout", layout, rule, advice="give either of them alone")
        parts = parse_layout(layout)
        parts = _without_mtp(layout, parts, behind)
        _check_layout(layout, parts, num_layers, pp=pp, vpp=2 if v_shape else vpp)
    elif not uneven:
        parts = _as_layout(
            _even_sizes(num_layers, pp, vpp, count_embedding=count_embedding, count_head=count_head)
        )
    elif counted:
        key = "parallel.last" if first is None else "parallel.first"
        rule = "cannot be combined with count_embedding or count_head"
        raise ConfigError(key, first or last, rule, nearest=(None,))
    else:
        parts = _as_layout(_uneven_sizes(num_layers, Pipeline(pp, vpp, v_shape), first, last=last))
    return _assemble(parts, Pipeline(pp, len(parts) // pp, v_shape), behind)


def parse_layout(layout: str | Sequence[Sequence[str]]) -> list[str]:
    """Return the stages of a layout as letters: "Et*3|(tt|)*2L" gives ["Ettt", "tt", "tt", "L"].

    E is the embedding, t a decoder layer, m a multi-token prediction layer, L the head with its
    loss; | ends a stage; x*n repeats a letter and (...)*n a part, which may hold |; commas are
    ignored. A list of stages, each a list of the names embedding, decoder, mtp, loss, is
    equivalent. A stage may be empty, as the third of "Et|t||L": it passes its input on. Raises
    ConfigError for anything else.
    """
    if not isinstance(layout, str):
        return ["".join(_letter(name) for name in stage) for stage in layout]
    letters = re.sub(r"\(([^()]+)\)\*(\d+)", _repeat, layout.replace(",", ""))
    letters = re.sub(r"(.)\*(\d+)", _repeat, letters)
    wrong = re.search(r"[^EtmL|]", letters)
    if wrong:
        rule = (
            f"cannot read {wrong[0]!r}: layers are E, t, m, L, stages end with |, repeats are t*3 "
            "or (tt|)*2, not nested"
        )
        raise ConfigError("parallel.layout", layout, rule, advice="write it like Et*3|(tt|)*2L")
    return letters.split("|")


def _repeat(match: re.Match[str]) -> str:
    return match[1] * int(match[2])


def _letter(name: str) -> str:
    if name.strip().lower() not in LETTERS:
        raise ConfigError("parallel.layout", name, f"is no layer; layers are {', '.join(LETTERS)}")
    return LETTERS[name.strip().lower()]


def _even_sizes(
    num_layers: int, pp: int, vpp: int, count_embedding: bool, count_head: bool
) -> list[int]:
    """Return the decoder layers of each stage, in order; embedding and head may count as layers."""
    num_stages = pp * vpp
    extra = count_embedding + count_head
    if (num_layers + extra) % num_stages:
        added = f" + {extra} for embedding and head" if extra else ""
        rule = (
            f"{num_layers} layers{added} do not divide over pp × vpp = {pp} × {vpp} = "
            f"{num_stages} stages"
        )
        raise ConfigError(
            "model.num_layers", num_layers, rule, nearest=_even(num_layers, pp, vpp, extra=extra)
        )
    sizes = [(num_layers + extra) // num_stages] * num_stages
    sizes[0] -= count_embedding
    sizes[-1] -= count_head
    return sizes


def _even(num_layers: int, pp: int, vpp: int, extra: int) -> tuple[FirstOf, ...]:
    """Return what works instead of an uneven split.

    Other sizes of the end stages, a spelled-out layout, or fewer stages; other numbers of layers if
    there are fewer than stages.
    """
    places = num_layers + extra
    stages = pp * vpp
    below = places // stages * stages
    per_chunk = places // vpp if places % vpp == 0 else places
    fewer = nearest_divisors(pp, per_chunk, "parallel.pp")
    if num_layers < stages or extra:  # no split of the ends helps
        layers = [FirstOf([n - extra]) for n in (below, below + stages) if n > extra]
        return (*layers, *fewer)
    size, more = divmod(num_layers, stages)
    spelled = spelled_layout([size + 1] * more + [size] * (stages - more))
    split = (Instead(*each) for each in _splits(num_layers, pp, vpp))
    several = (
        FirstOf(each for each in side.candidates if str(each) != "parallel.pp=1") for side in fewer
    )
    return (FirstOf([*islice(split, 4), Instead(f"parallel.layout='{spelled}'")]), *several)


def _splits(
    num_layers: int, pp: int, vpp: int, first: int | None = None, last: int | None = None
) -> list[tuple[str, ...]]:
    """Return overrides of `parallel.first` and `parallel.last` that fit, the most even split first.

    With one of them given, only the other is varied.
    """
    found = []
    most = num_layers // pp + 2 * vpp
    sizes = range(vpp, most + 1, vpp)
    for head in (None, *sizes) if first is None else (first,):
        for tail in (None, *sizes) if last is None else (last,):
            ends = [each for each in (head, tail) if each is not None]
            middle = pp - len(ends)
            rest = num_layers - sum(ends)
            if middle < 1 or rest < middle * vpp or rest % (middle * vpp):
                continue
            ranks = [*ends, rest // middle]
            words = [f"parallel.first={head}"] if first is None and head is not None else []
            words += [f"parallel.last={tail}"] if last is None and tail is not None else []
            if words:
                # prefer fewer layers beside the head, then beside the embedding
                ends_held = (tail or 0, head or 0)
                key = (max(ranks), max(ranks) - min(ranks), len(words), *ends_held)
                found.append((key, tuple(words)))
    return [words for _, words in sorted(found)]


def spelled_layout(sizes: Sequence[int]) -> str:
    """Return `parallel.layout` of stages with these numbers of layers: [2, 5, 1] is Ett|t*5|tL."""
    letters = [f"t*{size}" if size > SPELLED else "t" * size for size in sizes]
    letters[0] = "E" + letters[0]
    letters[-1] += "L"
    return "|".join(letters)


def _around(value: int, step: int) -> list[int]:
    """Return the positive multiples of `step` next to `value`; [0] if step is 0."""
    below = max(value // step, 1) * step if step else 0
    return [below, below + step] if step else [0]


def _uneven_sizes(
    num_layers: int, pipeline: Pipeline, first: int | None, last: int | None
) -> list[int]:
    """Return the decoder layers of each stage, in order, given those of the first or last rank."""
    pp = pipeline.pp
    vpp = pipeline.num_chunks
    for key, value in (("parallel.first", first), ("parallel.last", last)):
        if value is not None and (value < 1 or value % vpp):
            rule = f"layers of a pipeline rank must be a positive multiple of vpp={vpp}"
            raise ConfigError(key, value, rule, nearest=nearest_multiples(max(value, 1), vpp))
    head, tail = ([] if count is None else [count] for count in (first, last))
    middle = pp - len(head) - len(tail)
    fixed = sum(head + tail)
    if middle < 0:
        rule = f"first={first} is set too, but pp={pp} is only one rank"
        raise ConfigError("parallel.last", last, rule, nearest=(None,))
    rest = num_layers - fixed
    if rest < 0 or (rest == 0) != (middle == 0) or (middle and rest % (middle * vpp)):
        rule = (
            f"first={first}, last={last} leave {rest} layers for {middle} middle ranks of "
            f"vpp={vpp} stages"
        )
        fits = FirstOf(fixed + n for n in _around(rest, middle * vpp))
        kept = ((first, None), (None, last), (None, None))
        ends = (_splits(num_layers, pp, vpp, one, last=other) for one, other in kept)
        split = FirstOf(Instead(*words) for each in ends for words in each[:2])
        raise ConfigError("model.num_layers", num_layers, rule, nearest=(split, fits))
    per_rank = head + ([rest // middle] * middle if middle else []) + tail
    return [per_rank[pipeline.rank(stage)] // vpp for stage in range(pp * vpp)]


def _check_layout(layout: object, parts: list[str], num_layers: int, pp: int, vpp: int) -> None:
    letters = "".join(parts)
    chunks = len(parts) // pp
    rule = ""
    nearest: object = None
    if len(parts) % pp:
        rule = f"its {len(parts)} stages do not divide over pp={pp}"
        nearest = None
    elif vpp not in (1, chunks):
        rule = f"its {len(parts)} stages over pp={pp} make vpp={chunks}, not vpp={vpp}"
        nearest = Instead(f"parallel.vpp={chunks}")
    elif not re.fullmatch("Et*L", letters):
        middle = re.sub("[EL]", "", "|".join(parts))
        rule = "must have one E, before all layers, and one L, after them"
        nearest = f"E{middle}L"
    elif "E" not in parts[0] or "L" not in parts[-1]:
        rule = "must have E in its first stage and L in its last one"
        nearest = _ends_filled(parts)
    elif letters.count("t") != num_layers:
        count = letters.count("t")
        rule = f"has {count} t for model.num_layers={num_layers}"
        nearest = Instead(f"model.num_layers={count}")
    if rule:
        raise ConfigError("parallel.layout", layout, rule, nearest=nearest)


def _without_mtp(layout: object, parts: list[str], behind: int) -> list[str]:
    """Return a layout without its layers of multi-token prediction, which are before L wherever
    they are spelled out.
    """
    plain = [part.replace("m", "") for part in parts]
    if any("m" in part for part in parts):
        near = "|".join(plain).removesuffix("L") + "m" * behind + "L"
        if "|".join(parts) != near:
            times = f"model.mtp.layers={behind} times m, multi-token prediction"
            rule = f"needs {times}, right before L"
            raise ConfigError("parallel.layout", layout, rule, nearest=near)
    return plain


def _ends_filled(parts: list[str]) -> str:
    """Return the layout with E in the first and L in the last stage.

    Empty outer stages move before L.
    """
    inner = "|".join(parts).strip("|")
    first, _, last = inner.rpartition("|") if "|" in inner else (inner.removesuffix("L"), "|", "L")
    return first + "|" * (len(parts) - 1 - first.count("|")) + last


def _as_layout(sizes: list[int]) -> list[str]:
    """Return stages as letters: embedding in the first, head in the last."""
    parts = ["t" * size for size in sizes]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return parts


def _assemble(parts: list[str], pipeline: Pipeline, behind: int) -> StagePlan:
    starts = accumulate((part.count("t") for part in parts), initial=0)
    stages = [
        Stage(tuple(range(start, start + part.count("t"))), "E" in part, "L" in part)
        for part, start in zip(parts, starts, strict=False)
    ]
    last = stages[-1]
    first = sum(len(stage.layers) for stage in stages)
    more = range(first, first + behind)
    stages[-1] = replace(last, layers=(*last.layers, *more))
    chunks = range(pipeline.num_chunks)
    return StagePlan(
        tuple(
            tuple(stages[pipeline.stage(rank, chunk)] for chunk in chunks)
            for rank in range(pipeline.pp)
        )
    )
