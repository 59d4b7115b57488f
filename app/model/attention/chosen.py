"""Attention by torch or Transformer Engine, checked on this host, the latter with a few tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from app.choices import AttentionBackendKind, CpComm
from app.config import Run
from app.errors import ConfigError, Instead
from app.model.attention.transformer_engine import TransformerEngineAttention
from app.model.layers.attend import DocumentOffsets, TorchAttention, by_flash
from app.model.layers.transformer_engine import INSTALL, import_library, library_version
from app.rules.attention import KEY, ON_CPU

ORDERED = 9  # major compute capability from which cuDNN has a deterministic backward
FLASH = 8  # major compute capability from which torch has Flash
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
    most = run.data.most_documents(run.train.seq_len)
    documents = None
    if most is not None:
        ends_BD = torch.full((1, most), TRIED, dtype=torch.int32, device=device)
        documents = DocumentOffsets.of(ends_BD, leaves[0].shape[1], leaves[1].shape[1])
    window, kernels = _shortest_window(run), attend
    if any(spec.attention.sinks for spec in run.model.layer_specs):
        kernels = attend.with_sinks(torch.zeros(leaves[0].shape[2], dtype=dtype, device=device))
    try:
        for tried in dict.fromkeys((None, window and min(window, TRIED // 4))):
            out = kernels(*leaves, window=tried, documents=documents, scale=None)
            torch.autograd.grad(out, leaves, torch.zeros_like(out))
    except (RuntimeError, ValueError) as error:
        width, what = run.model.head_width, str(error).splitlines()[0]
        raise _refused(f"cuDNN has no kernel here for heads of {width}: {what}") from error
    return attend


def torch_attention(run: Run, dtype: torch.dtype, device: torch.device) -> TorchAttention:
    """Return attention by torch in this dtype. Raises ConfigError for what this host lacks."""
    window = _shortest_window(run)
    limited = run.data.document_mask or window is not None
    by_kernel = limited and by_flash(dtype, run.model.head_width)
    if by_kernel and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < FLASH:
        rule = f"needs compute capability {FLASH}.0 or above in {run.precision.params.value}"
        wide = Instead("precision=fp32")
        if run.data.document_mask:
            raise ConfigError("data.document_mask", True, rule, nearest=(False, wide))
        raise ConfigError("model.sliding_window", window, rule, nearest=wide)
    return TorchAttention(run.train.deterministic)


def _shortest_window(run: Run) -> int | None:
    """Return the shortest window of layers; None if no window is shorter than sequences."""
    windows = (spec.attention.window for spec in run.model.layer_specs)
    shorter = (window for window in windows if window is not None and window < run.train.seq_len)
    return min(shorter, default=None)


def _few_tokens(run: Run) -> Iterator[tuple[int, int, int, int]]:
    """Yield the shapes of a rank's queries, keys and values for a few tokens."""
    parallel, model = run.parallel, run.model
    gathers = parallel.cp > 1 and parallel.cp_comm_type is CpComm.all_gather
    parts = parallel.tp * (1 if gathers else parallel.cp)
    kv_heads = model.num_heads if model.mla else model.num_kv_heads
    yield 1, TRIED // 2 if gathers else TRIED, model.num_heads // parts, model.head_width
    for _ in range(2):
        yield 1, TRIED, kv_heads // parts, model.head_width


def attention_line(run: Run, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the report line that names the kernels in use; None for torch's usual ones."""
    if run.model.attention_softcap is not None:
        why = "no kernel caps scores" if device.type == "cuda" else "on a CPU"
        return (
            f"capped scores by matmuls of blocks of queries, slower than fused kernels: {why}; "
            "gradients in a fixed order"
        )
    limits = ["documents"] if run.data.document_mask else []
    limits += ["windows"] if _shortest_window(run) is not None else []
    by = f"{' and '.join(limits)} by " if limits else ""
    order = ", gradients in a fixed order" if run.train.deterministic else ""
    if run.train.attention_backend is AttentionBackendKind.transformer_engine:
        return f"{by}cuDNN by Transformer Engine {library_version()}{order}"
    if not limits:
        return None
    width = run.model.head_width
    if device.type == "cuda" and by_flash(dtype, width):
        return f"{by}torch's Flash kernels{order}"
    why = "on a CPU"
    if device.type == "cuda":
        why = f"Flash takes no heads of {width} values in {run.precision.params.value}"
    return f"{by}a mask of all queries and keys, slow in long sequences: {why}"


def _refused(rule: str, *others: object, advice: str | None = None) -> ConfigError:
    asked = AttentionBackendKind.transformer_engine
    near = (AttentionBackendKind.torch, *others)
    return ConfigError(KEY, asked, rule, nearest=near, advice=advice)
