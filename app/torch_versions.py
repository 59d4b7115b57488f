"""One place for names that differ between the supported versions of torch (2.11 and newer), or
that are not public.
"""

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


def enqueued(group: dist.ProcessGroup) -> int:
    """Collectives that this process has enqueued in `group`; over gloo sends and receives too."""
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # private
    return number


def another_connection(store: dist.Store) -> dist.Store:
    """The same store, for another thread: who waits on one connection holds up all who use it."""
    copy: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's types
    return copy


def flight_records() -> list[dict[str, Any]]:
    """The newest collectives of this process, as gloo's and NCCL's flight recorders have them.

    Empty where TORCH_FR_BUFFER_SIZE=0 has turned them off.
    """
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    dumps = (getattr(torch._C._distributed_c10d, name, None) for name in names)
    # With collectives, without stack traces, and not only active ones: gloo's have no state.
    traces = [pickle.loads(dump(True, False, False)) for dump in dumps if dump is not None]
    return [entry for trace in traces for entry in trace.get("entries", [])]


def add_gemm(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right; on a GPU sums of more bits than the matrices have are rounded once,
    inside the product.
    """
    if total.is_cuda and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # equal types need no such product, and CPUs have none
        total.add_(left @ right)


def wide_gemm(left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """left · right of bf16 matrices, in fp32 or in their own type, then as torch rounds products of
    that type.
    """
    if left.is_cuda:
        return left @ right if dtype == left.dtype else torch.mm(left, right, out_dtype=dtype)
    return (left.float() @ right.float()).to(dtype)  # CPUs have no such product


def unowned(tensor: Tensor) -> Tensor:
    """A tensor on the same GPU memory that does not keep it from being freed, as memory of a
    CUDA graph's pool needs it.
    """
    storage = tensor.untyped_storage()
    # Private, but the only way to a storage without an owner; torch's own graph trees go it too.
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    alias = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    return alias.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


@contextmanager
def captured_on_current_stream() -> Iterator[None]:
    """Within the block torch.cuda.graph captures on the current stream where it is told none.

    Its own choice is a stream that nothing has run on: libraries would take memory for that one
    too, and autograd would go back to the streams on which gradients were added before.
    """
    before = torch.cuda.graph.default_capture_stream
    torch.cuda.graph.default_capture_stream = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.graph.default_capture_stream = before
