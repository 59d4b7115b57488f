"""GPU memory of driver and libraries besides tensors (docs/planning.md).

`bench/memory.py` measures it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from app.config import Run
from app.plan.graphs import GraphPlan
from app.plan.groups import GroupKind
from app.plan.memory.activations import ChunkActivations

MIB = 2**20

CUDA_CONTEXT = 840 * MIB  # bytes of a process's CUDA context with the kernels that a step loads
# bytes of an NCCL communicator of several ranks, after its first use
COMMUNICATOR = MappingProxyType(
    {GroupKind.data: 670 * MIB, GroupKind.stages: 200 * MIB, GroupKind.control: 24 * MIB}
)
# bytes of NCCL besides, at most: allocated once, with the default communicator
NCCL_ITSELF = 370 * MIB
FRAGMENTATION = 0.1  # reserved by torch's allocator beyond what it has handed out, over the latter
# bytes of a stream's cuBLAS workspaces in torch's allocator: one per thread, forward and backward
WORKSPACES = 2 * 32 * MIB
FP8_WORKSPACE = 32 * MIB  # bytes of the workspace that Transformer Engine's GEMMs share
GRAPH = 96 * 1024  # bytes of an instantiated CUDA graph
GRAPH_KERNEL = 1500  # bytes per kernel in a graph; up to CUDA 12.3 it was 64 KiB
BACKWARD_KERNELS = 3  # kernels of a backward per kernel of its forward
UPDATE_KERNELS = 30  # kernels of an update: sums over ranks, norm, divisor
BUCKET_KERNELS = 3  # kernels of an update per bucket


def needs_cublas(chunks: Sequence[ChunkActivations]) -> bool:
    """Return whether a rank with these chunks has any GEMM by cuBLAS."""
    return any(chunk.cublas for chunk in chunks)


def library_workspaces(
    run: Run, graphs: GraphPlan | None, chunks: Sequence[ChunkActivations]
) -> int:
    """Return bytes of GEMM workspaces on a rank with these chunks and partial graphs.

    Shared experts may have a stream of their own, and so does the trial run in which Transformer
    Engine prepares the graphs of a pool. If all GEMMs are in FP8, cuBLAS needs none.
    """
    moe = run.model.moe
    streams = 2 if moe is not None and moe.shared_overlap else 1
    streams = streams if needs_cublas(chunks) else 0
    captured = any(chunk.usual.graph.cublas for chunk in chunks)
    trials = len(graphs.orders) if graphs is not None and captured else 0
    fp8 = FP8_WORKSPACE if run.precision.fp8.by_library else 0
    return (streams + trials) * WORKSPACES + fp8
