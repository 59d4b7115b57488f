"""Phases of a decoder layer, by name: units of execution, capture, recomputation and tracing."""

from __future__ import annotations

from enum import StrEnum

from app.choices import GraphScope, Offload


class PhaseName(StrEnum):
    """Every phase that a layer may have, in order."""

    attn = "attn"
    mlp = "mlp"
    norm = "norm"
    shared = "shared"
    route = "route"
    preprocess = "preprocess"
    dispatch = "dispatch"
    experts = "experts"
    combine = "combine"
    finish = "finish"


ROUTER = (PhaseName.norm, PhaseName.shared, PhaseName.route)
EXPERTS = (PhaseName.dispatch, PhaseName.experts, PhaseName.combine, PhaseName.finish)
# phases of each kind of layer
DENSE = (PhaseName.attn, PhaseName.mlp)
MOE = (PhaseName.attn, *ROUTER, PhaseName.preprocess, *EXPERTS)
CAPTURED = {
    GraphScope.attn: (PhaseName.attn,),
    GraphScope.mlp: (PhaseName.mlp,),
    GraphScope.moe_router: ROUTER,
    GraphScope.moe_preprocess: (PhaseName.preprocess,),
    GraphScope.moe: (*ROUTER, PhaseName.preprocess, *EXPERTS),
}  # part of a layer -> its phases that a graph holds
OFFLOADED = {
    Offload.layers: DENSE + MOE[1:],
    Offload.attn: (PhaseName.attn,),
    Offload.mlp: (PhaseName.mlp,),
    Offload.moe: MOE[1:],
}  # part of a layer -> its phases that keep what they save in host memory
