"""Process groups over which a rank computes its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from app.choices import CpComm
from app.plan.sharding.blocks import ShardCoords


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Process groups that shard the tensors of a layer, by their names in `app.plan.groups`; None
    stands for a group of one rank.

    Between the matrices of a layer, tokens are sharded along the sequence, first by `cp` and each
    part by `tp` (sequence parallelism, Korthikanti et al. 2022). Inside the matrices a rank has all
    tokens of its context-parallel part, and the matrices are sharded by `tp`. Experts lie on a grid
    of their own over the same ranks: ep ranks hold different experts, and etp ranks hold one part
    each of the hidden width of the same experts.
    """

    tp: dist.ProcessGroup | None = None  # parts of matrices
    cp: dist.ProcessGroup | None = None  # parts of sequences
    cp_comm_type: CpComm = CpComm.all_gather  # collective over `cp` in attention
    tp_cp_control: dist.ProcessGroup | None = None  # all parts of the same sequences
    tp_cp_dp_control: dist.ProcessGroup | None = None  # all tokens of a step
    etp_ep: dist.ProcessGroup | None = None  # together they have all experts of a layer
    ep: int = 1  # ranks with different experts
    ep_rank: int = 0  # which share of the experts this rank has
    etp: int = 1  # ranks that share each expert
    etp_rank: int = 0  # which part of its experts' hidden width this rank has

    @property
    def coords(self) -> ShardCoords:
        """Return this rank's coordinates on the axes that shard weights."""
        return ShardCoords(
            (rank(self.tp), size(self.tp)), (self.ep_rank, self.ep), (self.etp_rank, self.etp)
        )


ALONE = LayerGroups()  # single-rank groups: nothing is sharded


def size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group; 1 for None."""
    return 1 if group is None else group.size()


def rank(group: dist.ProcessGroup | None) -> int:
    """Return this rank's index in a group; 0 for None."""
    return 0 if group is None else group.rank()
