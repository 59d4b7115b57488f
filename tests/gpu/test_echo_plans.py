"""Plans of clones on a GPU: the kernel makes those of plain torch, and a graph replays both what
plans and what follows the plan.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.choices import CloneAlgorithm
from app.moe.echo import plan_clones, reroute
from tests.echo_plans import PACKS, SEARCHES, check_kernel, check_reroute_kernel, draw_counts
from tests.moe_kernels import without_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
plain = pytest.fixture(without_kernels)


@pytest.mark.parametrize("algorithm", CloneAlgorithm)
@pytest.mark.parametrize(
    ("ranks", "local"), [(2, 64), (8, 32), (8, 5), (16, 16), (64, 4), (2, 256), (3, 1)]
)
def test_plans(ranks: int, local: int, algorithm: CloneAlgorithm, plain: None):
    for seed, threshold in enumerate((0.0, 0.05, 0.5)):
        for most in (2, 30_000):
            counts_RE = draw_counts(ranks, local, most, seed=seed)
            for spares in (1,) if algorithm is PACKS else (1, 2, 3):
                check_kernel(counts_RE, spares, algorithm, threshold)


@pytest.mark.parametrize(("ranks", "local", "top_k"), [(8, 32, 8), (2, 64, 6), (3, 5, 2)])
def test_tokens(ranks: int, local: int, top_k: int, plain: None):
    check_reroute_kernel(ranks, local, top_k, 3000, seed=ranks)


@pytest.mark.parametrize("algorithm", [CloneAlgorithm.one_shot_greedy, SEARCHES])
def test_a_graph_replays_plans_and_what_follows_them(algorithm: CloneAlgorithm):
    ranks, experts, top_k = 8, 256, 8

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator("cuda").manual_seed(seed)
        scores = torch.rand(ranks * 4096, experts, generator=drawn, device="cuda")
        scores *= torch.rand(experts, generator=drawn, device="cuda") + 0.5
        chosen_RTK = scores.topk(top_k).indices.view(ranks, 4096, top_k)
        counts = [each.flatten().bincount(minlength=experts) for each in chosen_RTK]
        return torch.stack(counts), chosen_RTK[3]

    def work() -> tuple[Tensor, ...]:
        plan = plan_clones(counts_RE, 2, algorithm, 0.02)
        return *plan, reroute(experts_TK, *plan, rank=3)

    counts_RE, experts_TK = draw(0)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            replayed = work()
    for seed in (1, 2):
        for buffer, values in zip((counts_RE, experts_TK), draw(seed), strict=True):
            buffer.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        on_cpu = plan_clones(counts_RE.cpu(), 2, algorithm, 0.02)
        wanted = (*on_cpu, reroute(experts_TK.cpu(), *on_cpu, rank=3))
        assert on_cpu[1].sum() > 0
        assert all(torch.equal(a.cpu(), b) for a, b in zip(replayed, wanted, strict=True))
