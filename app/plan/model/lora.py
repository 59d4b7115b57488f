"""Adapters of rank r beside the matrices of linear layers and experts (LoRA, arXiv 2106.09685).

A fused matrix has one pair per linear layer in it, as `peft` has for a model of `transformers`:
queries, keys and values; gate and up. Gate and up of experts have one pair together if
`lora.targets` name `gate_up_proj`, and in experts with biases (GPT-OSS), which `transformers` has
no linear layers for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TypeVar

from app.config.lora import LoraConfig
from app.plan.model.weight import Adapter, Initial, Part, Weight

P = TypeVar("P", bound=Part)
FEED_FORWARDS = {
    "body.mlp": "mlp",
    "body.shared": "mlp.shared_experts",
    "body.experts": "mlp.experts",
}
# our weight in a layer -> the linear layers in it, in the order of its outputs
LINEARS: dict[str, tuple[str, ...]] = {
    "attn.wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.wo": ("self_attn.o_proj",),
    "attn.w_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "attn.w_out": ("linear_attn.out_proj",),
    "attn.q_a": ("self_attn.q_a_proj",),
    "attn.q_b": ("self_attn.q_b_proj",),
    "attn.kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "attn.kv_b": ("self_attn.kv_b_proj",),
    **{f"{ours}.w_up": (f"{their}.gate_proj", f"{their}.up_proj")
       for ours, their in FEED_FORWARDS.items()},
    **{f"{ours}.w_down": (f"{their}.down_proj",) for ours, their in FEED_FORWARDS.items()},
}  # fmt: skip
EXPERTS_UP, GATE_UP = "body.experts.w_up", "mlp.experts.gate_up_proj"
ROUTER, ROUTER_NAMES = "body.router.weight", ("mlp.gate", "mlp.router")


def chosen(linear: str, targets: tuple[str, ...]) -> bool:
    """Return whether targets name a linear layer: by consecutive parts of its path. None: all.

    A router must be named itself, as one or the other of its names.
    """
    if linear in ROUTER_NAMES:
        paths = {name[start:] for name in ROUTER_NAMES for start in (0, len("mlp."))}
        return not paths.isdisjoint(targets)
    return not targets or any(f".{target}." in f".{linear}." for target in targets)


def linears_in(name: str, part: Part, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the linear layers in a weight of a layer, given the part of the model that has it."""
    if name == ROUTER:
        return ROUTER_NAMES[:1]
    if name == EXPERTS_UP:
        named = any(target and f".{GATE_UP}".endswith(f".{target}") for target in targets)
        if named or getattr(part, "b_up", None) is not None:
            return (GATE_UP,)
    linears = LINEARS.get(name, ())
    if len(linears) > 1 and isinstance(up := getattr(part, "w_up", None), Weight):
        return linears if up.gate_up is not None else linears[1:]
    return linears


def linears_within(part: Part, targets: tuple[str, ...], path: str = "") -> set[str]:
    """Return the linear layers in all weights of a layer's part."""
    found = set[str]()
    for field in fields(part):
        inner, name = getattr(part, field.name), path + field.name
        if isinstance(inner, Weight):
            found.update(linears_in(name, part, targets))
        elif isinstance(inner, Part):
            found |= linears_within(inner, targets, f"{name}.")
    return found


def adapted(part: P, lora: LoraConfig, path: str = "") -> P:
    """Return a layer's part whose weights have the adapters that `lora` asks for."""
    changed: dict[str, Weight | Part] = {}
    for field in fields(part):
        inner, name = getattr(part, field.name), path + field.name
        if isinstance(inner, Weight) and (linears := linears_in(name, part, lora.targets)):
            pairs = tuple(_adapters(inner, lora, linears))
            changed[field.name] = replace(inner, adapters=pairs)
        elif isinstance(inner, Part):
            changed[field.name] = adapted(inner, lora, f"{name}.")
    return replace(part, **changed)


def _adapters(weight: Weight, lora: LoraConfig, linears: tuple[str, ...]) -> Iterator[Adapter]:
    fused = weight.fused if weight.fused and len(linears) > 1 else (1,) * len(linears)
    alternates = fused is weight.fused
    for number, linear in enumerate(linears):
        if chosen(linear, lora.targets):
            first = sum(fused[:number])
            place = (first, first + fused[number], sum(fused))
            yield _pair(weight, lora, linear.rpartition(".")[2], *place, alternates=alternates)


def _pair(
    weight: Weight,
    lora: LoraConfig,
    name: str,
    first: int,
    stop: int,
    of: int,
    *,
    alternates: bool,
) -> Adapter:
    rank = lora.rank
    assert rank is not None, "a run with adapters has a rank"
    if weight.expert:  # [expert, in, out], or [expert, in, 2, out] of gate and up
        experts, inputs, *outputs = weight.shape
        of_input = weight.etp == 1
        outputs = outputs if name == GATE_UP.rpartition(".")[2] else outputs[-1:]
        a = Weight((experts, inputs, rank), ep=0, etp=1 if of_input else None)
        b = Weight(
            (experts, rank, *outputs),
            ep=0,
            etp=None if of_input else 1 + len(outputs),
            gate_up=2 if len(outputs) == 2 else None,
        )
    else:  # [out, in], or [2, out, in] of gate and up
        *outputs, inputs = weight.shape
        of_input = weight.tp == len(outputs)
        rows = outputs[-1] // of * (stop - first) if alternates else outputs[-1]
        a = Weight((rank, inputs), tp=1 if of_input else None)
        b = Weight((rows, rank), tp=None if of_input or weight.tp is None else 0)
    a = replace(a, initial=Initial.kaiming, linear=False, rank=rank)
    b = replace(b, initial=Initial.zeros, linear=False, rank=rank)
    return Adapter(name, a, b, first, stop, of, alternates)
