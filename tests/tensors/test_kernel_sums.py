"""Sums over events of a profile, and how much of communication no compute kernel hides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from app.engine.step.kernel_sums import KernelSums, covered, part_of

NAMES = {
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "c10d::_allgather_base_": "communication",
    "gloo:all_reduce": "communication",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "GEMMs",
    "aten::mm": "GEMMs",
    "aten::grouped_mm": "grouped GEMMs",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<group_gemm": (
        "grouped GEMMs"
    ),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_adamw_kernel": "optimizer",
    "Memcpy DtoD (Device -> Device)": "copies",
    "aten::mul": "other",
}


def event(name: str, begin: float, end: float, gpu: bool = True, **more: Any) -> Any:
    kind = DeviceType.CUDA if gpu else DeviceType.CPU
    span = SimpleNamespace(start=begin, end=end)
    found = {"is_user_annotation": False, "self_cpu_time_total": end - begin} | more
    return SimpleNamespace(name=name, device_type=kind, time_range=span, **found)


def test_parts_are_known_by_their_names():
    assert {name: part_of(name) for name in NAMES} == NAMES


def test_only_communication_beside_no_kernel_is_exposed():
    events = [
        event("nvjet_a", 0, 1000),
        event("ncclDevKernel_AllReduce", 500, 3000),  # 2 ms of it alone, but for the next kernel
        event("rms_norm", 2000, 2500),
        event("Memcpy HtoD (Pinned -> Device)", 0, 9000),
        event("a step", 0, 9000, is_user_annotation=True),
        event("aten::mm", 0, 9000, gpu=False),
    ]
    found = KernelSums.of(events)
    assert found.parts == {"GEMMs": 1.0, "communication": 2.5, "other": 0.5}
    assert (found.compute, found.exchange, found.kernels) == (1.5, 1.5, 3)


def test_operations_of_a_cpu_have_no_gaps():
    mine = {"self_cpu_time_total": 250.0, "is_user_annotation": True}
    found = KernelSums.of(
        [event("aten::mm", 0, 500, gpu=False), event("F0.0", 0, 9, False, **mine)]
    )
    assert found == KernelSums({"GEMMs": 0.5, "Python": 0.25})


def test_spans_that_overlap_count_once():
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == pytest.approx(4)
