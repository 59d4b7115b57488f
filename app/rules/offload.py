"""Rules of `recompute.offload`."""

from __future__ import annotations

from app.choices import GraphImpl, Offload, Recompute
from app.config import Run
from app.errors import ConfigError, Instead

KEY = "recompute.offload"


def check_offload(run: Run) -> None:
    """Refuse offloading where there is nothing to offload, or where a copy could be late."""
    chosen, graph, moe = run.recompute.offload, run.cuda_graph, run.model.moe
    if not chosen:
        return
    value = f"[{','.join(part.value for part in chosen)}]"
    whole, none = f"{KEY}=[layers]", f"{KEY}=[]"
    if graph.impl not in (GraphImpl.none, GraphImpl.full_iteration):
        rule = (
            "copies what autograd saves, which lies in memory of the graphs with "
            f"cuda_graph.impl={graph.impl.value}"
        )
        near = (Instead("cuda_graph=full_iteration"), Instead("cuda_graph=none"), Instead(none))
        raise ConfigError(KEY, value, rule, nearest=near)
    if run.recompute.full and set(chosen) != {Offload.layers}:
        rule = f"recompute.full=true saves only the layers' inputs, which {whole} copies"
        raise ConfigError(KEY, value, rule, nearest=Instead(whole))
    if Offload.moe in chosen and Recompute.moe in run.recompute.phases:
        rule = f"recompute.phases=[moe] saves only that part's input, which {whole} copies"
        raise ConfigError(KEY, value, rule, nearest=Instead(whole))
    routed = {spec.routed for spec in run.model.layer_specs}
    for part, there in ((Offload.moe, True in routed), (Offload.mlp, False in routed)):
        if part in chosen and not there:
            rule = f"model={run.model.name} has no layers with this part"
            raise ConfigError(KEY, value, rule, nearest=Instead(whole))
    experts = {Offload.layers, Offload.moe} & {*chosen}
    if moe is not None and experts and moe.shared_overlap:
        rule = "waits on one stream, and the shared expert saves on another"
        less = Instead("model.moe.shared_overlap=false")
        raise ConfigError(KEY, value, rule, nearest=(less, Instead(f"{KEY}=[attn]")))
    if moe is not None and experts and moe.echo.spares:
        rule = "copies what experts save, with model.moe.echo.spares also weights of clones"
        less = Instead("model.moe.echo.spares=0")
        raise ConfigError(KEY, value, rule, nearest=(less, Instead(f"{KEY}=[attn]")))
