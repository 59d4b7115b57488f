"""Build the planned token dispatcher with its transport, paged buffer and expert clones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from app.choices import StaticTransport
from app.config import Run
from app.engine.ranks.dtypes import DTYPES
from app.errors import ConfigError
from app.fp8.dispatch import Fp8LocalDispatcher, Fp8PeerTransport, Fp8Transport
from app.fp8.ready import ReadyRows
from app.kernels.common import moves_tiles, triton
from app.model.layers.layer_groups import LayerGroups
from app.moe.clones.cloning import Cloning
from app.moe.clones.peer import PeerClones
from app.moe.clones.transport import CloneTransport, CollectiveClones
from app.moe.dispatch.all_gather import AllGatherDispatcher
from app.moe.dispatch.all_to_all import AllToAllDispatcher
from app.moe.dispatch.cloning import CloningDispatcher
from app.moe.dispatch.local import LocalDispatcher
from app.moe.dispatch.paged_buffer import PagedBuffer, PagingDispatcher
from app.moe.dispatch.peer import PeerTransport
from app.moe.dispatch.static import StaticDispatcher
from app.moe.dispatch.transport import CollectiveTransport, SizedTransport, TokenTransport
from app.moe.protocol import Dispatcher
from app.plan.model.experts import ExpertWeights
from app.plan.parts.all_gather import PlannedAllGather
from app.plan.parts.all_to_all import PlannedAllToAll
from app.plan.parts.dispatcher import run_dispatcher, tokens_per_rank
from app.plan.parts.local import PlannedLocal
from app.plan.parts.static import PlannedStatic
from app.plan.sharding.blocks import ShardCoords


@dataclass(frozen=True, slots=True)
class BuiltDispatcher:
    """Dispatcher of all MoE layers of a rank, and what it is made of."""

    dispatcher: Dispatcher[Any, Any] | None  # None: a dense model
    static: StaticDispatcher | None = None  # None: of another kind
    cloning: Cloning | None = None  # None: without clones
    paging: PagingDispatcher[Any, Any] | None = None  # None: without a paged buffer


def build_dispatcher(
    run: Run,
    layer_groups: LayerGroups,
    device: torch.device,
    paged_buffer: PagedBuffer | None = None,
    ready: ReadyRows | None = None,
) -> BuiltDispatcher:
    """Build the one dispatcher of all MoE layers of a rank.

    `paged_buffer` keeps the rows that backward needs; None leaves them to autograd. Kernels leave
    rows in FP8 in `ready`; None if experts read no FP8.
    """
    planned = run_dispatcher(run)
    if planned is None:
        return BuiltDispatcher(None)
    experts, group = planned.moe.num_experts, layer_groups.etp_ep
    if isinstance(planned, PlannedLocal):
        local = LocalDispatcher(experts) if ready is None else Fp8LocalDispatcher(experts, ready)
        return BuiltDispatcher(local)
    assert group is not None, "experts on several ranks have a group"
    match planned:
        case PlannedAllGather():
            return BuiltDispatcher(AllGatherDispatcher(experts, group, planned.etp))
        case PlannedAllToAll():
            return BuiltDispatcher(AllToAllDispatcher(experts, group, planned.etp))
        case PlannedStatic():
            return _build_static(
                run, planned, layer_groups, device=device, paged_buffer=paged_buffer, ready=ready
            )
    raise AssertionError(f"{planned.kind} has no module")


def _build_static(
    run: Run,
    planned: PlannedStatic,
    layer_groups: LayerGroups,
    *,
    device: torch.device,
    paged_buffer: PagedBuffer | None,
    ready: ReadyRows | None,
) -> BuiltDispatcher:
    """Build the static dispatcher, wrapped for FP8, clones and the paged buffer as the run asks."""
    group = layer_groups.etp_ep
    assert group is not None
    collective: TokenTransport = CollectiveTransport(group, planned.experts, planned.etp)
    peer: SizedTransport | None = build_peer_transport(run, planned, group, device=device)
    if ready is not None:
        collective = Fp8Transport(CollectiveTransport(group, planned.experts, planned.etp), ready)
        peer = Fp8PeerTransport(peer, ready) if isinstance(peer, PeerTransport) else None
    static = StaticDispatcher(
        planned, collective, peer, ep_rank=layer_groups.ep_rank, device=device
    )
    dispatcher: Dispatcher[Any, Any] = static
    cloning = build_cloning(run, planned, group, device=device, peer=peer is not None)
    if cloning is not None:
        dispatcher = CloningDispatcher(static, cloning)
    if paged_buffer is None:
        return BuiltDispatcher(dispatcher, static, cloning)
    paging = PagingDispatcher(dispatcher, static, paged_buffer)
    return BuiltDispatcher(paging, static, cloning, paging=paging)


def build_cloning(
    run: Run, planned: PlannedStatic, group: dist.ProcessGroup, *, device: torch.device, peer: bool
) -> Cloning | None:
    """Build the cloning of hot experts over `group`, through `peer` memory or collectives.

    None without spare slots. Raises ConfigError if the GPU lacks what its kernels need.
    """
    echo = planned.moe.echo
    if not echo.spares:
        return None
    if device.type == "cuda" and (triton is None or not moves_tiles(device)):
        what = "Triton is not installed" if triton is None else "this GPU is older than Hopper"
        rule = f"clones need Triton kernels for Hopper or newer, and {what}"
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
    return Cloning(echo, transport, rank=group.rank(), ranks=group.size(), device=device)


def build_peer_transport(
    run: Run, planned: PlannedStatic, group: dist.ProcessGroup, *, device: torch.device
) -> PeerTransport | None:
    """Build the symmetric memory through which ranks of `group` write tokens to each other's GPU.

    None leaves tokens to collectives. Raises ConfigError if it is asked for and unavailable.
    """
    transport = planned.moe.static.transport
    key, near = "model.moe.static.transport", ("collective",)
    if not planned.peer:
        return None
    if device.type == "cpu" or triton is None:
        if transport is StaticTransport.auto:
            return None
        what = "this is a CPU" if device.type == "cpu" else "Triton is not installed"
        rule = f"needs GPUs and Triton, and {what}"
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
        rule = f"these GPUs have no peer access to each other's memory: {error}"
        raise ConfigError(key, transport, rule, nearest=near) from error
