"""Transformer Engine's attention, checked on this host with a few tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from app.choices import AttentionBackendKind, CpComm
from app.config import Run
from app.config.training import TrainConfig
from app.errors import ConfigError, Instead
from app.model.attention.transformer_engine import TransformerEngineAttention
from app.model.layers.transformer_engine import INSTALL, import_library, library_version
from app.rules.attention import KEY, ON_CPU

ORDERED = 9  # major compute capability from which cuDNN has a deterministic backward
TRIED = 64  # tokens


def library_attention(
    run: Run, dtype: torch.dtype, device: torch.device
) -> TransformerEngineAttention:
    """Return attention by Transformer Engine in this dtype. Raises ConfigError for what this host
    lacks.
    """
    deterministic = run.train.deterministic
    if device.type != "cuda":
        raise _refused(ON_CPU)
    import_library(lambda rule: _refused(rule, advice=INSTALL))
    if deterministic and torch.cuda.get_device_capability(device)[0] < ORDERED:
        rule = "cuDNN's backward is deterministic on Hopper and newer GPUs, not on this one"
        raise _refused(rule, Instead("train.deterministic=false"))
    attend = TransformerEngineAttention(deterministic)
    leaves = [
        torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        for shape in _few_tokens(run)
    ]
    try:
        out = attend(*leaves, mask_B1SK=None, scale=None)
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
    except (RuntimeError, ValueError) as error:
        width, what = run.model.head_width, str(error).splitlines()[0]
        raise _refused(f"cuDNN has no kernel here for heads of {width}: {what}") from error
    return attend


def _few_tokens(run: Run) -> Iterator[tuple[int, int, int, int]]:
    """Yield the shapes of a rank's queries, keys and values for a few tokens."""
    parallel, model = run.parallel, run.model
    gathers = parallel.cp > 1 and parallel.cp_comm_type is CpComm.all_gather
    parts = parallel.tp * (1 if gathers else parallel.cp)
    kv_heads = model.num_heads if model.mla else model.num_kv_heads
    yield 1, TRIED // 2 if gathers else TRIED, model.num_heads // parts, model.head_width
    for _ in range(2):
        yield 1, TRIED, kv_heads // parts, model.head_width


def attention_line(train: TrainConfig) -> str:
    """Return the report line that names the kernels in use."""
    order = ", gradients in a fixed order" if train.deterministic else ""
    return f"cuDNN by Transformer Engine {library_version()}{order}"


def _refused(rule: str, *others: object, advice: str | None = None) -> ConfigError:
    asked = AttentionBackendKind.transformer_engine
    near = (AttentionBackendKind.torch, *others)
    return ConfigError(KEY, asked, rule, nearest=near, advice=advice)
