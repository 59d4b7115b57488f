"""Kernels of clones on a GPU, at the sizes of training."""

from __future__ import annotations

import pytest
import torch

from app.kernels.grouped_gemm import grouped_gemm
from tests.clone_kernels import (
    check_add_clones,
    check_grouped_gemm,
    check_push_clones,
    draw_clones,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
SHAPES = pytest.mark.parametrize(("width", "columns"), [(2048, 1536), (768, 4096), (40, 200)])


@DTYPES
@SHAPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("counts", "first"),
    [([700, 1500, 3000, 641], 2), ([0, 33, 0, 1, 257, 0], 1), ([0, 0, 0], 1), ([5000], 0)],
    ids=str,
)
def test_grouped_gemm(
    counts: list[int],
    first: int,
    width: int,
    columns: int,
    transposed: bool,
    dtype: torch.dtype,
):
    for spare in (0, 3):
        check_grouped_gemm(
            counts,
            first,
            width,
            columns=columns,
            dtype=dtype,
            transposed=transposed,
            spare=spare,
        )


def test_grouped_gemm_beyond_32_bits():
    check_grouped_gemm([600_000, 20_000, 7], 1, 64, columns=4096, dtype=BF16)


def test_a_graph_reads_where_groups_end():
    """Captured once, replayed with other ends."""
    rows_TI, weight_GIO = (
        torch.randn(*shape, device="cuda").to(BF16) for shape in ((900, 256), (2, 256, 384))
    )
    out_TO = torch.zeros(900, 384, dtype=BF16, device="cuda")
    ends_E = torch.tensor([100, 300, 700], device="cuda").int()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        grouped_gemm(out_TO, rows_TI, weight_GIO, ends_E, first=1)  # is compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            grouped_gemm(out_TO, rows_TI, weight_GIO, ends_E, first=1)
        for ends in ([100, 300, 700], [0, 0, 900], [513, 640, 641], [900, 900, 900]):
            ends_E.copy_(torch.tensor(ends))
            out_TO.zero_()
            graph.replay()
            found_TO, wanted_TO = out_TO.clone(), torch.zeros_like(out_TO)
            grouped_gemm(wanted_TO, rows_TI, weight_GIO, ends_E, first=1)
            assert torch.equal(found_TO, wanted_TO)
            written_T = torch.arange(900, device="cuda")
            written_T = (written_T >= ends[0]) & (written_T < ends[2])
            assert torch.equal(found_TO.ne(0).any(dim=1), written_T)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(
    "size",
    [
        (2, 1, 4, (2048, 1536)),
        (4, 2, 2, (1024, 768)),
        (8, 8, 2, (256, 384)),
        (2, 2, 2, (77, 1033)),
        (2, 1, 2, (4096, 3000)),
    ],
    ids=str,
)
def test_clones(size: tuple[int, int, int, tuple[int, int]], dtype: torch.dtype):
    for seed, full in enumerate((2 / 3, 1.0, 0.0)):
        drawn = draw_clones(*size, dtype=dtype, seed=seed, full=full)
        check_push_clones(drawn)
        check_add_clones(drawn, dtype)
