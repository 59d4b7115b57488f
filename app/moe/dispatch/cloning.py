"""Static dispatch that sends choices of hot experts to their clones (ECHO, `app.moe.clones`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from app.moe.clones.cloning import ClonedDispatch, Cloning
from app.moe.clones.record import Clones
from app.moe.dispatch.static import Places, StaticDispatcher
from app.moe.experts import Dispatched


@dataclass(frozen=True, slots=True)
class ClonedPlaces:
    """Dispatch layout after choices were rerouted to clones."""

    places: Places
    clones: Clones


class CloningDispatcher:
    """Wrapper of a static dispatcher: replans every microbatch's hot experts."""

    def __init__(self, static: StaticDispatcher, cloning: Cloning) -> None:
        self.static = static
        self.cloning = cloning

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, rows_per_expert: int | None = None
    ) -> ClonedPlaces:
        """Plan clones, reroute choices to them, and place the rows."""
        goes_TK, clones = self.cloning.plan(experts_TK, self.static.planned.moe.num_experts)
        return ClonedPlaces(self.static.preprocess(goes_TK, drops, rows_per_expert), clones)

    def dispatch(self, x_TD: Tensor, prepared: ClonedPlaces) -> tuple[Dispatched, Places]:
        """Map T × D -> R × D, expert-major; rows of clones follow those of this rank's experts."""
        dispatched, places = self.static.dispatch(x_TD, prepared.places)
        return ClonedDispatch(
            dispatched.rows_RD,
            dispatched.ends_E,
            self.cloning.transport,
            clones=prepared.clones,
        ), places

    def combine(self, expert_out_RD: Tensor, probs_TK: Tensor, origin: Places) -> Tensor:
        """Map R × D -> T × D."""
        return self.static.combine(expert_out_RD, probs_TK, origin)
