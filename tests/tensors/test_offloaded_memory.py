"""What offloading keeps on the device is what is planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from app.choices import Dtype, Offload, Recompute
from app.model.offload import HostBuffers, OffloadedTensor
from tests.tensors.activation_memory import (
    DENSE,
    SIGMOID,
    chunk_of,
    forward_and_backward,
    planned,
    run_of,
    with_kernels,
)

pytest.importorskip("triton")
kernels = pytest.fixture(autouse=True)(with_kernels)
DEEP = dataclasses.replace(DENSE, num_layers=6)
MODELS = {"dense": DEEP, "moe": dataclasses.replace(DEEP, moe=SIGMOID)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", dict(offload=(Offload.layers,))),
    "dense attn": ("dense", dict(offload=(Offload.attn,))),
    "dense mlp": ("dense", dict(offload=(Offload.mlp,), phases=(Recompute.norm,))),
    "dense full": ("dense", dict(offload=(Offload.layers,), full=True)),
    "moe": ("moe", dict(offload=(Offload.layers,))),
    "moe alone": ("moe", dict(offload=(Offload.moe,))),
    "moe recomputed": ("moe", dict(offload=(Offload.layers,), phases=(Recompute.moe,))),
}


@pytest.mark.parametrize(("name", "recompute"), CASES.values(), ids=CASES)
def test_device_and_host_keep_what_is_planned(name: str, recompute: dict[str, Any]):
    run = run_of(MODELS[name], Dtype.bfloat16, **recompute)
    plain = dataclasses.replace(run, recompute=dataclasses.replace(run.recompute, offload=()))
    memory, before = planned(run), planned(plain)
    assert memory.total + memory.offloaded == before.total
    chunk = chunk_of(run)
    buffers = HostBuffers([chunk], run.recompute.offload, torch.device("cpu"))
    sent: list[Tensor] = []
    send = buffers.send

    def noted(saved: Tensor) -> OffloadedTensor:
        found = send(saved)
        sent.append(found.host.view(torch.uint8))
        return found

    buffers.send = noted
    _, _, backward = forward_and_backward(run, chunk, True)
    host = buffers.host_bytes
    used = sum(map(len, sent))
    assert memory.offloaded == pytest.approx(used, rel=0.05)
    assert used <= host <= 1.125 * used
    assert memory.total + memory.backward == pytest.approx(backward - host, rel=0.05)
    assert memory.total + memory.backward < before.total + before.backward
