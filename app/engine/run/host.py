"""Check the host's libraries and GPU before data and weights are read."""

from __future__ import annotations

import torch

from app.choices import Fp8Part, GraphImpl
from app.config import Run
from app.engine.capture.transformer_engine import graphed_callables
from app.engine.fp8 import arithmetic_maker, experts_arithmetic


def check_host(run: Run, device: torch.device) -> None:
    """Raise ConfigError if this host lacks a library or GPU feature that the run needs."""
    if run.cuda_graph.impl is GraphImpl.transformer_engine:
        graphed_callables()
    fp8 = run.precision.fp8
    if fp8.recipe is not None and fp8.by_library:
        arithmetic_maker(fp8.backend, fp8.recipe, device)
    if fp8.recipe is not None and Fp8Part.experts in fp8.include:
        experts_arithmetic(fp8.backend, run.precision.params, device, include=fp8.include)
