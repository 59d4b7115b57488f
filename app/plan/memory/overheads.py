"""GPU memory of driver and libraries besides tensors (docs/planning.md).

`bench/memory.py` measures it.
"""

from __future__ import annotations

from types import MappingProxyType

from app.plan.groups import GroupKind

MIB = 2**20

MOST = 0.95  # of a GPU's memory with optional parts: plans may be 5 % too small
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
