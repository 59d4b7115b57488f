"""Gated delta rule by flash-linear-attention's kernels, where it is installed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module, metadata
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from app.model.attention.delta_rule import DeltaRule, by_torch
from app.model.attention.linear import LinearAttention

LIBRARY = "fla-core"  # the package of flash-linear-attention that has the kernels
OLDEST = (0, 5)  # first release that takes several value heads to a key head
HOPPER = 9  # major compute capability
# Releases of Triton between which the library refuses its backward on Hopper, unless tilelang does
# it (github.com/fla-org/flash-linear-attention/issues/640).
WRONG_SINCE, RIGHT_AGAIN = (3, 4), (3, 7, 1)
INSTALL = "pip install 'graphfold[linear]'"


def use_kernels(modules: Iterable[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Let all linear attention among `modules` compute by the fastest implementation here."""
    rule = by_library if why_by_torch(dtype, device) is None else by_torch
    chosen: DeltaRule = rule
    for module in modules:
        if isinstance(module, LinearAttention):
            module.delta_rule = chosen


def why_by_torch(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why torch computes the delta rule on this device; None: the library does."""
    if device.type != "cuda":
        return "on a CPU"
    if dtype is torch.float32:
        return "in float32"
    try:
        version = metadata.version(LIBRARY)
    except metadata.PackageNotFoundError:
        return f"slow; {INSTALL} brings kernels"
    if _release(version) < OLDEST:
        return f"slow; {LIBRARY} {version} is older than {'.'.join(map(str, OLDEST))}"
    if torch.cuda.get_device_capability(device)[0] != HOPPER or find_spec("tilelang"):
        return None
    triton = metadata.version("triton")
    if WRONG_SINCE <= _release(triton) < RIGHT_AGAIN:
        wrong = f"the library's backward is wrong with Triton {triton} on this GPU"
        return f"slow; {wrong}: pip install tilelang, or Triton 3.7.1"
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def linear_attention_line(dtype: torch.dtype, device: torch.device, *, deterministic: bool) -> str:
    """Return what computes the delta rule, and what that means for equal runs, for the opening."""
    if (why := why_by_torch(dtype, device)) is not None:
        return f"by torch: {why}"
    tuned = ", whose kernels are chosen by their times: other hosts may round otherwise"
    return f"by flash-linear-attention{tuned if deterministic else ''}"


def by_library(
    q_BSGK: Tensor, k_BSGK: Tensor, v_BSHV: Tensor, *, g_BSH: Tensor, beta_BSH: Tensor
) -> Tensor:
    """Compute by flash-linear-attention (`DeltaRule`)."""
    kernels = import_module("fla.ops.gated_delta_rule")
    out_BSHV: Tensor = kernels.chunk_gated_delta_rule(
        q_BSGK.contiguous(),
        k_BSGK.contiguous(),
        v_BSHV.contiguous(),
        g_BSH,
        beta_BSH,
        use_qk_l2norm_in_kernel=True,
    )[0]
    return out_BSHV
