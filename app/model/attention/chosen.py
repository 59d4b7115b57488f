"""From a run's choice of attention to what computes it."""

from __future__ import annotations

import torch

from app.choices import AttentionBackendKind
from app.config.training import TrainConfig
from app.errors import ConfigError
from app.model.attention.kernels import Attend, TorchAttention
from app.model.attention.transformer_engine import TransformerEngineAttention
from app.model.transformer_engine import INSTALL, import_library, library_version

KEY = "train.attention_backend"
ORDERED = 9  # major compute capability from which cuDNN has an ordered backward
TRIED = 64  # tokens


def attention_kernel(train: TrainConfig, width: int, device: torch.device) -> Attend:
    """What attends with heads of a width, as the run says. ConfigError for what this host lacks."""
    if train.attention_backend is AttentionBackendKind.torch:
        return TorchAttention(train.deterministic)
    if device.type != "cuda":
        raise _refused("Transformer Engine computes on GPUs, and this run does on a CPU")
    import_library(_to_be_installed)
    if train.deterministic and torch.cuda.get_device_capability(device)[0] < ORDERED:
        raise _refused(
            "cuDNN attends in a fixed order on GPUs like Hopper and newer, not on this one"
        )
    attend = TransformerEngineAttention(train.deterministic)
    shape = 1, TRIED, 1, width
    heads = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(3)]
    leaves = [each.requires_grad_() for each in heads]
    try:
        out = attend(*leaves, mask_B1SK=None, scale=None)
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
    except (RuntimeError, ValueError) as error:
        what = str(error).splitlines()[0]
        raise _refused(f"Transformer Engine cannot attend here: {what}") from error
    return attend


def attention_line(train: TrainConfig) -> str:
    """What Transformer Engine does of it, in words."""
    order = ", gradients in a fixed order" if train.deterministic else ""
    return f"cuDNN by Transformer Engine {library_version()}{order}"


def _refused(rule: str) -> ConfigError:
    asked = AttentionBackendKind.transformer_engine
    return ConfigError(KEY, asked, rule, nearest=AttentionBackendKind.torch)


def _to_be_installed(rule: str) -> ConfigError:
    asked = AttentionBackendKind.transformer_engine
    return ConfigError(KEY, asked, rule, nearest=AttentionBackendKind.torch, advice=INSTALL)
