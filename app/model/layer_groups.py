"""The ranks that a rank computes its layers with."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from app.choices import CpComm
from app.plan.sharding.blocks import ShardCoords


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups over which the tensors of a layer are cut, by their names in `app.plan.groups`; None:
    there is nobody else.

    Between its matrices a layer has its tokens cut along the sequence, by `cp` first and each part
    by `tp` (sequence parallelism, Korthikanti et al. 2022). Inside its matrices it has all tokens
    of a context-parallel rank, and the matrices are cut by `tp`. Experts lie on a grid of their own
    over the same ranks: ep ranks have different experts, and etp ranks a part each of the hidden
    width of the same ones.
    """

    tp: dist.ProcessGroup | None = None  # parts of matrices
    cp: dist.ProcessGroup | None = None  # parts of sequences
    cp_comm_type: CpComm = CpComm.all_gather  # what these exchange for attention
    tp_cp_control: dist.ProcessGroup | None = None  # all parts of the same sequences
    tp_cp_dp_control: dist.ProcessGroup | None = None  # all tokens of a step
    etp_ep: dist.ProcessGroup | None = None  # together they have all experts of a layer
    ep: int = 1  # ranks with different experts
    ep_rank: int = 0  # which share of the experts this rank has
    etp: int = 1  # ranks that share each expert
    etp_rank: int = 0  # which part of its experts' hidden width this rank has

    @property
    def coords(self) -> ShardCoords:
        """Where this rank is on the axes that cut weights."""
        return ShardCoords(
            (rank(self.tp), size(self.tp)), (self.ep_rank, self.ep), (self.etp_rank, self.etp)
        )


ALONE = LayerGroups()


def size(group: dist.ProcessGroup | None) -> int:
    """Ranks of a group; 1 for None."""
    return 1 if group is None else group.size()


def rank(group: dist.ProcessGroup | None) -> int:
    """This rank's place in a group."""
    return 0 if group is None else group.rank()
