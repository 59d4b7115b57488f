"""From a plan to what takes tokens to experts, with the memory and the clones that it needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from app.choices import StaticTransport
from app.config import Run
from app.engine.dtypes import DTYPES
from app.errors import ConfigError
from app.kernels.common import moves_tiles, triton
from app.model.layer_groups import LayerGroups
from app.moe.clones.cloning import Cloning
from app.moe.clones.peer import PeerClones
from app.moe.clones.transport import CloneTransport, CollectiveClones
from app.moe.dispatch.all_gather import AllGatherDispatcher
from app.moe.dispatch.all_to_all import AllToAllDispatcher
from app.moe.dispatch.local import LocalDispatcher
from app.moe.dispatch.paged_buffer import PagedBuffer
from app.moe.dispatch.peer import PeerTransport
from app.moe.dispatch.static import StaticDispatcher
from app.moe.dispatch.transport import CollectiveTransport
from app.moe.protocol import Dispatcher
from app.plan.dispatchers.all_gather import PlannedAllGather
from app.plan.dispatchers.all_to_all import PlannedAllToAll
from app.plan.dispatchers.choose import run_dispatcher, tokens_per_rank
from app.plan.dispatchers.local import PlannedLocal
from app.plan.dispatchers.paged_buffer import planned_paged_buffer
from app.plan.dispatchers.static import PlannedStatic
from app.plan.model.experts import ExpertWeights
from app.plan.plan import Plan
from app.plan.sharding.blocks import ShardCoords


def build_paged_buffer(
    plan: Plan, run: Run, pp_rank: int, *, device: torch.device
) -> PagedBuffer | None:
    """What keeps rows of experts on a rank for backward, of a `run` that is else as planned; None:
    autograd does.
    """
    planned = planned_paged_buffer(run, plan.stages.stages[pp_rank], plan.actions[pp_rank])
    return None if planned is None else PagedBuffer(planned, device)


def build_dispatcher(
    run: Run,
    layer_groups: LayerGroups,
    device: torch.device,
    paged_buffer: PagedBuffer | None = None,
) -> Dispatcher[Any, Any] | None:
    """What serves the experts of all layers of a rank, as planned; None: there are none."""
    planned = run_dispatcher(run)
    if planned is None:
        return None
    experts, group = planned.moe.num_experts, layer_groups.etp_ep
    if isinstance(planned, PlannedLocal):
        return LocalDispatcher(experts)
    assert group is not None, "experts on several ranks have a group"
    match planned:
        case PlannedAllGather():
            return AllGatherDispatcher(experts, group, planned.etp)
        case PlannedAllToAll():
            return AllToAllDispatcher(experts, group, planned.etp)
        case PlannedStatic():
            collective = CollectiveTransport(group, planned.experts, planned.etp)
            peer = build_peer_transport(run, planned, group, device=device)
            cloning = build_cloning(run, planned, group, device=device, peer=peer is not None)
            return StaticDispatcher(
                planned,
                collective,
                peer,
                ep_rank=layer_groups.ep_rank,
                device=device,
                paged_buffer=paged_buffer,
                cloning=cloning,
            )
    raise AssertionError(f"{planned.kind} has no module")


def build_cloning(
    run: Run, planned: PlannedStatic, group: dist.ProcessGroup, *, device: torch.device, peer: bool
) -> Cloning | None:
    """What has hot experts cloned between the ranks of `group`, by `peer` memory or collectives;
    None: nothing does. Raises ConfigError where the GPU lacks what its kernels need.
    """
    echo = planned.moe.echo
    if not echo.spares:
        return None
    if device.type == "cuda" and (triton is None or not moves_tiles(device)):
        what = "Triton is not installed" if triton is None else "this GPU is older than Hopper"
        rule = f"rows of clones are found on the device by kernels, and {what}"
        raise ConfigError("model.moe.echo.spares", echo.spares, rule, nearest=0)
    weights = ExpertWeights.of(run.model.hidden_size, planned.moe.ffn_hidden_size, planned.own)
    both = weights.w_up, weights.w_down
    shapes = [torch.Size(ShardCoords().shape(weight)[1:]) for weight in both]
    transport: CloneTransport = (
        PeerClones(
            group,
            planned.own,
            echo.spares,
            shapes=shapes,
            dtype=DTYPES[run.precision.params],
            device=device,
        )
        if peer
        else CollectiveClones(group, planned.own, echo.spares, shapes=shapes, device=device)
    )
    return Cloning(echo, transport, rank=group.rank(), device=device)


def build_peer_transport(
    run: Run, planned: PlannedStatic, group: dist.ProcessGroup, *, device: torch.device
) -> PeerTransport | None:
    """The memory that the ranks of `group` reach in each other's GPU; None: collectives carry
    tokens. Raises ConfigError where it is asked for and cannot be had.
    """
    transport = planned.moe.static.transport
    key, near = "model.moe.static.transport", ("collective",)
    if not planned.peer:
        return None
    if device.type == "cpu" or triton is None:
        if transport is StaticTransport.auto:
            return None
        what = "there are none" if device.type == "cpu" else "Triton is not installed"
        rule = f"is for GPUs, by Triton's kernels, and {what}"
        raise ConfigError(key, transport, rule, nearest=near)
    try:
        return PeerTransport(
            group,
            planned.experts,
            planned.etp,
            tokens=tokens_per_rank(run),
            width=run.model.hidden_size,
            top_k=planned.moe.top_k,
            dtype=DTYPES[run.precision.params],
            device=device,
        )
    except RuntimeError as error:
        rule = f"these GPUs do not reach each other's memory: {error}"
        raise ConfigError(key, transport, rule, nearest=near) from error
