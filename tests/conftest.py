"""Settings of every test: one thread per process, no network, kernels interpreted where there is
no GPU.
"""

from __future__ import annotations

import os

import pytest

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", OMP_NUM_THREADS="1")
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # torch packs bf16 for AMX by what oneDNN finds, and its attention then fails without AVX-512:
    # whoever wants an older processor gets it for both.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import torch

if not torch.cuda.is_available():
    # read when a kernel is defined: without a GPU its tests run it in Python
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)

ENVIRON = os.environ


@pytest.fixture(autouse=True)
def the_same_environ() -> None:
    """`datasets` leaves a copy of os.environ in its place once it has mapped in several processes:
    who had imported the first one, as rich has, would see no variable that a test sets.
    """
    os.environ = ENVIRON  # noqa: B003 - not to clear it
