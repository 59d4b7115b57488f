"""Global ranks of every parallel axis: pure arithmetic, no process group.

Dense parameters are laid out on the grid tp × cp × dp × pp, expert parameters on etp × ep × edp ×
pp over the same ranks ("parallel folding": attention and experts may divide a pipeline stage in
different ways). `order` lists the axes from the fastest-varying one. With the coordinate c of each
axis,

    rank = Σ c[axis] · Π (sizes of the axes before it in `order`)

so that tp=4, dp=2, pp=2 in order tp-dp-pp has rank = tp_rank + 4·dp_rank + 8·pp_rank and its dp
groups are [0, 4], [1, 5], [2, 6], [3, 7], [8, 12] … The experts use the same order with tp → etp
and dp → edp: rank = etp_rank + etp·ep_rank + etp·ep·edp_rank + etp·ep·edp·pp_rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from app.config import Run
from app.errors import ConfigError, nearest_multiples

AXES = ("tp", "cp", "ep", "dp", "pp")
# name in `order` -> axis of the dense grid
DENSE_AXIS = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}
# name in `order` -> axis of the expert grid
EXPERT_AXIS = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}


def axis_groups(sizes: Sequence[int], chosen: Collection[int]) -> list[list[int]]:
    """Split range(prod(sizes)) into groups that differ only in coordinates of the `chosen` axes.

    `sizes` lists the axes from the fastest-varying one and `chosen` are positions in it. Groups are
    ordered by the other coordinates and ranks within a group by the chosen ones, both with the
    first axis fastest.
    """
    inside = _corners(sizes, [axis for axis in range(len(sizes)) if axis in chosen])
    starts = _corners(sizes, [axis for axis in range(len(sizes)) if axis not in chosen])
    return [[start + offset for offset in inside] for start in starts]


def _corners(sizes: Sequence[int], axes: Sequence[int]) -> list[int]:
    """Return the ranks of all points whose coordinates are zero outside `axes`."""
    ranks = [0]
    for axis in axes:
        stride = prod(sizes[:axis])
        ranks = [index * stride + rank for index in range(sizes[axis]) for rank in ranks]
    return ranks


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of every parallel axis over `world_size` ranks, and the groups that they form.

    Raises ConfigError (a ValueError) for degrees that do not divide the world, for malformed
    orders, and if dense and expert grids would put a rank into different pipelines.
    """

    world_size: int  # ranks
    tp: int = 1  # tensor-parallel ranks of dense layers
    cp: int = 1  # context-parallel ranks: each has a part of every sequence
    pp: int = 1  # pipeline ranks
    ep: int = 1  # expert-parallel ranks: each has a share of a layer's experts
    etp: int | None = None  # tensor-parallel ranks of one expert; None: tp
    order: str = "tp-cp-ep-dp-pp"  # axes from the fastest-varying; an axis left out must be 1

    def __post_init__(self) -> None:
        self._check_degrees()
        self._check_order()
        self._check_pipelines()

    @property
    def expert_tp(self) -> int:
        """`etp`, or `tp` if that is None."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Data-parallel replicas of dense parameters: world_size / (tp · cp · pp)."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel replicas of expert parameters: world_size / (etp · ep · pp)."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    def sizes(self, expert: bool = False) -> dict[str, int]:
        """Return the size of each axis of the dense or the expert grid, fastest-varying first."""
        return dict(self._expert_sizes if expert else self._dense_sizes)

    @cached_property
    def _dense_sizes(self) -> dict[str, int]:
        values = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return self._ordered(DENSE_AXIS, values)

    @cached_property
    def _expert_sizes(self) -> dict[str, int]:
        values = {"tp": self.expert_tp, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        return self._ordered(EXPERT_AXIS, values)

    def _ordered(self, names: Mapping[str, str], values: Mapping[str, int]) -> dict[str, int]:
        """Return axis -> size in `order`, by names in it."""
        listed = self.order.lower().split("-")
        ordered = listed + [axis for axis in AXES if axis not in listed]
        return {names[axis]: values[axis] for axis in ordered if axis in names}

    def coords(self, rank: int, expert: bool = False) -> dict[str, int]:
        """Return the index of `rank` on each axis of the dense or expert grid.

        ValueError for no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size} ranks")
        found = {}
        for axis, size in self.sizes(expert).items():
            rank, found[axis] = divmod(rank, size)
        return found

    def groups(self, *axes: str, expert: bool = False) -> list[list[int]]:
        """Return all groups of ranks that differ only along `axes` (in any order).

        Dense axes are tp, cp, dp, pp; with expert=True they are etp, ep, edp, pp. The order of
        groups, and of ranks within a group, follows `order`. Raises ValueError for an axis that the
        grid does not have.
        """
        sizes = self.sizes(expert)
        unknown = [axis for axis in axes if axis not in sizes]
        if unknown:
            grid = "expert" if expert else "dense"
            raise ValueError(
                f"the {grid} grid has no axis {unknown[0]!r}; it has {', '.join(sizes)}"
            )
        return axis_groups(list(sizes.values()), {list(sizes).index(axis) for axis in axes})

    def embedding_groups(self) -> list[list[int]]:
        """Return first and last rank of each pipeline, which hold the copies of tied embeddings."""
        return [
            [pipeline[0], pipeline[-1]] if len(pipeline) > 1 else pipeline
            for pipeline in self.groups("pp")
        ]

    def _check_degrees(self) -> None:
        degrees = {
            "tp": self.tp,
            "cp": self.cp,
            "pp": self.pp,
            "ep": self.ep,
            "etp": self.expert_tp,
        }
        for name, degree in {"world_size": self.world_size, **degrees}.items():
            if degree < 1:
                raise ConfigError(f"parallel.{name}", degree, "must be at least 1", nearest=1)
        for axes in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
            degree_product = prod(degrees[axis] for axis in axes)
            if self.world_size % degree_product:
                rule = (
                    f"must be a multiple of {' × '.join(axes)} = "
                    f"{' × '.join(str(degrees[axis]) for axis in axes)} = {degree_product}"
                )
                raise ConfigError(
                    "parallel.world_size",
                    self.world_size,
                    rule,
                    nearest=nearest_multiples(self.world_size, degree_product),
                )

    def _check_order(self) -> None:
        listed = self.order.lower().split("-")
        known = [axis for axis in dict.fromkeys(listed) if axis in AXES]
        if known != listed:
            rule = f"must list each of {', '.join(AXES)} at most once, joined by '-'"
            raise ConfigError("parallel.order", self.order, rule, nearest="-".join(known or AXES))
        for axis in (axis for axis in AXES if axis not in listed):
            size = max(
                self.sizes().get(DENSE_AXIS.get(axis, ""), 1),
                self.sizes(expert=True).get(EXPERT_AXIS.get(axis, ""), 1),
            )
            if size > 1:
                rule = f"leaves out {axis}, which has {size} ranks"
                raise ConfigError("parallel.order", self.order, rule, nearest="-".join(AXES))

    def _check_pipelines(self) -> None:
        if self.pp == 1 or self.order.lower().endswith("pp"):
            return
        grids = (
            f"tp={self.tp}, cp={self.cp}, dp={self.dp} and etp={self.expert_tp}, ep={self.ep}, "
            f"edp={self.edp}"
        )
        pp_last = "-".join(
            [axis for axis in self.order.lower().split("-") if axis != "pp"] + ["pp"]
        )
        if self.dp != self.edp:
            raise ConfigError(
                "parallel.order",
                self.order,
                f"does not end in pp, which needs dp = edp: {grids}",
                nearest=pp_last,
            )
        if self.groups("pp") != self.groups("pp", expert=True):
            raise ConfigError(
                "parallel.order",
                self.order,
                f"dense and expert layers get different pipelines: {grids}",
                nearest=pp_last,
            )


def select_layout(run: Run) -> ParallelLayout:
    """Return the layout of a run. Raises ConfigError for degrees that do not fit together."""
    found: ParallelLayout | None = run.derived.get("layout")
    if found is None:
        p, world = run.parallel, run.world_size
        found = ParallelLayout(world, p.tp, p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order)
        run.derived["layout"] = found
    return found
