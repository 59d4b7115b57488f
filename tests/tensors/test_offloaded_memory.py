"""What offloading keeps on the device is what is planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from app.choices import Dtype, Offload, Recompute
from app.errors import ConfigError
from app.model.host_memory import HostMemory
from app.model.offload import HostBuffers, OffloadedTensor
from app.plan.recompute import recompute_policy
from tests.tensors.activation_memory import (
    DENSE,
    SIGMOID,
    batch_of,
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
    "moe mlp": ("moe", dict(offload=(Offload.mlp,))),
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
    assert used <= host <= 1.125 * used and host <= buffers.memory.pinned
    assert memory.total + memory.backward == pytest.approx(backward, rel=0.05)
    assert memory.total + memory.backward < before.total + before.backward


@pytest.mark.parametrize("told", ["CUDA error: out of memory", "CUDA error: unspecified"])
def test_no_host_memory_is_told_with_advice(monkeypatch: pytest.MonkeyPatch, told: str):
    def fail(memory: HostMemory, size: int) -> None:
        raise RuntimeError(told)

    run = run_of(DENSE, Dtype.float32, offload=(Offload.layers,))
    chunk = chunk_of(run)
    HostBuffers([chunk], run.recompute.offload, torch.device("cpu"))
    monkeypatch.setattr(HostMemory, "_more", fail)
    with pytest.raises((ConfigError, RuntimeError)) as error:
        forward_and_backward(run, chunk, True)
    message = str(error.value)
    if "out of memory" not in told:
        assert message == told
        return
    assert message.startswith(
        "recompute.offload=[layers]: this rank has pinned 0.00 GiB of host memory, and gets no "
        "0.06 GiB more; offload fewer parts, or "
    )
    assert "recompute.full=true recompute.phases=[] recompute.offload=[]" in message


class Bits(torch.autograd.Function):
    """Negative values become 0; backward reads the same memory as fp32 and as integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = x * 1
        ctx.save_for_backward(made, made.view(torch.int32))
        return made.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        made, bits = ctx.saved_tensors
        return grad * made * (bits >> 31 == 0)


def test_another_type_of_the_same_memory_stays():
    run = run_of(DENSE, Dtype.float32, offload=(Offload.layers,))
    chunk, batch = chunk_of(run), batch_of(run)
    buffers = HostBuffers([chunk], run.recompute.offload, torch.device("cpu"))
    again = recompute_policy(run).usual
    context = chunk.context(batch.positions, batch.ends, recompute=again)
    value = torch.randn(256, 256, requires_grad=True)
    with context.recompute.forward():
        out = context.recompute.whole_layer(Bits.apply, value)
    assert buffers.host_bytes == value.nbytes
    out.sum().backward()
    assert torch.equal(value.grad, value.detach().clamp(min=0))
