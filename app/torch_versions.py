"""Names that differ between the supported versions of torch (2.11 and newer), or are not public."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_together(
    outputs: list[Tensor], shards: list[Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Start one all-gather per output and shard, in one launch."""
    newer = getattr(group, "all_gather_single_coalesced", None)
    started: dist.Work = (newer or group.allgather_into_tensor_coalesced)(outputs, shards)
    return started


def reduce_scatter_together(
    shards: list[Tensor], buffers: list[Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Start one reduce-scatter per shard and buffer, in one launch."""
    newer = getattr(group, "reduce_scatter_single_coalesced", None)
    started: dist.Work = (newer or group.reduce_scatter_tensor_coalesced)(shards, buffers)
    return started


def enqueued(group: dist.ProcessGroup) -> int:
    """Return how many collectives this process has enqueued in `group`.

    With gloo, sends and receives too.
    """
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # private
    return number


def default_store() -> dist.Store:
    """Return the store of the default process group, which must be initialised."""
    store: dist.Store = dist.distributed_c10d._get_default_store()  # private
    return store


def another_connection(store: dist.Store) -> dist.Store:
    """Return the store over a connection of its own, for another thread.

    A blocking wait on a shared connection would block every thread that uses it.
    """
    copy: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's types
    return copy


def flight_records() -> list[dict[str, Any]]:
    """Return this process's newest collectives from gloo's and NCCL's flight recorders.

    Empty if TORCH_FR_BUFFER_SIZE=0 has turned them off.
    """
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    dumps = (getattr(torch._C._distributed_c10d, name, None) for name in names)
    # With collectives, without stack traces, and not only active ones: gloo's have no state.
    traces = [pickle.loads(dump(True, False, False)) for dump in dumps if dump is not None]
    return [entry for trace in traces for entry in trace.get("entries", [])]


def add_gemm(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left · right.

    On a GPU a wider `total` accumulates inside the GEMM, so that each sum is rounded once.
    """
    if total.is_cuda and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # equal types need no mixed-precision GEMM, and CPUs have none
        total.add_(left @ right)


def wide_gemm(left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return left · right of bf16 matrices in fp32, or rounded to `dtype` as torch rounds it."""
    if left.is_cuda:
        return left @ right if dtype == left.dtype else torch.mm(left, right, out_dtype=dtype)
    return (left.float() @ right.float()).to(dtype)  # CPUs have no such GEMM


def unowned(tensor: Tensor) -> Tensor:
    """Return a non-owning alias: a tensor on the same GPU memory that does not keep it alive.

    Memory of a CUDA graph's pool needs this: a second owner would keep it from being reused.
    """
    storage = tensor.untyped_storage()
    # Private, but the only way to a storage without an owner; torch's own graph trees use it too.
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    alias = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    return alias.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


@contextmanager
def captured_on_current_stream() -> Iterator[None]:
    """Make torch.cuda.graph capture on the current stream by default within the block.

    Its own default is a fresh stream: libraries would allocate workspaces for that one too, and
    autograd would switch back to the streams that earlier gradients were accumulated on.
    """
    before = torch.cuda.graph.default_capture_stream
    torch.cuda.graph.default_capture_stream = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.graph.default_capture_stream = before
