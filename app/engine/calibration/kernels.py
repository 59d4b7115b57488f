"""Measure the kernels of one GPU through the functions that training calls.

docs/planning.md says how plans use the results. Shapes: T tokens, D hidden size, F feed-forward
width, V vocabulary, E experts, K experts per token, R dispatched rows, S sequence length, N heads
of width H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from app.engine.calibration import solve
from app.engine.calibration.clock import Clock, Outputs
from app.engine.calibration.solve import GIGA, MICRO, TERA
from app.kernels import cross_entropy
from app.kernels.adamw import AdamWSettings, ShardSlices, adamw_update, update_rates
from app.kernels.attention.heads import split_and_rotate
from app.kernels.common import usable
from app.model.layers.attend import TorchAttention
from app.model.layers.layers import RMSNorm, swiglu
from app.moe.permute import combine, permute, sort_by_expert
from app.moe.router_matmul import router_matmul
from app.plan.model.norm import NormWeights
from app.plan.model.weight import Weight
from app.torch_versions import add_gemm

SIZE = 2  # bytes of an element
SUMS_MOST = 4.0  # upper bound of sums_gb_s in units of memory speed: a GEMM hides most of it
ROUTER_KERNELS = 7  # of router scores and both gradients
KERNELS = 3 * (1 + 3)  # of three operations: the plan counts 1 per forward and 3 per backward
BLOCKS = 16  # of three operations, so that autograd's start-up is spread as in a model


@dataclass(frozen=True, slots=True)
class MeasuredSizes:
    """Sizes of the measured tensors and messages."""

    square: int = 8192  # rows and columns of the large GEMM
    tokens: int = 8192  # T
    hidden: int = 2048  # D
    expert: int = 1536  # columns of an expert's first weight
    vocab: int = 50304  # V
    experts: int = 32  # E
    top_k: int = 8  # K
    sequences: tuple[int, ...] = (1024, 4096, 16384)  # S
    heads: int = 32  # N
    widths: tuple[int, ...] = (64, 128)  # H
    adam: int = 2**26  # elements of an optimizer update
    steady_s: float = 2.0  # seconds of back-to-back GEMMs before a sustained measurement
    # bytes that a rank sends to others
    sent: tuple[int, ...] = (2**18, 2**20, 2**22, 2**24, 2**26)

    @property
    def many(self) -> int:
        """Rows per expert in the large grouped GEMM."""
        return 4 * self.tokens // self.experts


def kernel_speeds(clock: Clock, sizes: MeasuredSizes) -> dict[str, Any]:
    """Measure the keys of `HardwareProfile` that depend on one GPU and its host."""
    measure = _Measure(clock, sizes, kernel=clock.start())
    other = measure.other()
    tflops, share = measure.gemms(other[0])
    return {
        "gemm_tflops": tflops,
        "sustained_tflops": tflops * measure.kept(),
        "gemm_memory": share,
        "router_tflops": measure.router(),
        **measure.grouped(tflops, share, other[0]),
        "attention": measure.attention(),
        "activation_gb_s": measure.activation(),
        "heads_gb_s": measure.heads(),
        "norm_gb_s": measure.norm(),
        "loss_gb_s": measure.loss(),
        "rows_gb_s": measure.rows(),
        "other_gb_s": other,
        "sums_gb_s": measure.sums(tflops, share, other[0]),
        "optimizer_gb_s": measure.optimizer(),
        "kernel_us": measure.kernel / MICRO,
        "launch_us": measure.launch() / MICRO,
        "host_gb_s": measure.host(),
    }


def _norm(x: Tensor) -> RMSNorm:
    """Build an RMSNorm for the last dimension of `x`, in its type and on its device."""
    module = RMSNorm(NormWeights(Weight((x.shape[-1],))), 1e-5).to(x)
    torch.nn.init.ones_(module.weight)
    return module


class _Measure:
    """Measurements of one GPU: one method per key, each with its own tensors."""

    def __init__(self, clock: Clock, sizes: MeasuredSizes, kernel: float) -> None:
        self.clock = clock
        self.sizes = sizes
        self.kernel = kernel  # seconds that a kernel takes to start

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return a tensor of normal random values."""
        return torch.randn(shape, device=self.clock.device).to(dtype)

    def both(self, forward: float, backward: float, times: Sequence[float]) -> list[float]:
        """Return GB/s of a forward and a backward that move these numbers of bytes."""
        moved = zip((forward, backward), times, strict=True)
        return [solve.rate(size, took, self.kernel) for size, took in moved]

    def gemms(self, memory: float) -> tuple[float, float]:
        """Return (gemm_tflops, gemm_memory), from a large square GEMM and those of a layer.

        The layer's GEMMs overlap less of their memory traffic.
        """
        s = self.sizes
        wide = 4 * s.hidden
        layer = [
            (s.tokens, k, n) for k, n in product((s.hidden, wide), repeat=2) if k * n < wide**2
        ]
        found = []
        for m, k, n in ((s.square,) * 3, *layer):
            x, w = self.random(m, k), self.random(n, k)
            took = self.clock.seconds(partial(F.linear, x, w)) - self.kernel
            found.append((2.0 * m * n * k, SIZE * float(m * k + n * k + m * n), took))
        return solve.gemms(found, memory)

    def kept(self) -> float:
        """Return the share of its speed that the large GEMM sustains back to back."""
        s = self.sizes
        run = partial(F.linear, self.random(s.square, s.square), self.random(s.square, s.square))
        return min(1.0, self.clock.seconds(run) / self.clock.steady(run, s.steady_s))

    def router(self) -> float:
        """Return TFLOP/s of router scores and both gradients."""
        s = self.sizes
        x = self.random(s.tokens, s.hidden).requires_grad_()
        w = self.random(4 * s.experts, s.hidden).requires_grad_()
        grad = self.random(s.tokens, 4 * s.experts, dtype=torch.float32)

        def passes() -> Outputs:
            return torch.autograd.grad(router_matmul(x, w), (x, w), grad)

        took = self.clock.seconds(passes)
        flops = 3 * 2.0 * x.numel() * len(w)
        return solve.rate(flops, took, ROUTER_KERNELS * self.kernel, unit=TERA)

    def grouped(self, tflops: float, share: float, memory: float) -> dict[str, float]:
        """Measure grouped GEMMs with many and with few rows per expert; capped at `tflops`."""
        s = self.sizes
        w = self.random(s.experts, s.hidden, s.expert)
        found = []
        for rows in (s.many, s.many // 4):
            x = self.random(rows * s.experts, s.hidden)
            counts = torch.arange(1, s.experts + 1, device=x.device, dtype=torch.int32)
            took = self.clock.seconds(partial(F.grouped_mm, x, w, offs=counts * rows))
            moved = SIZE * (x.numel() + w.numel() + len(x) * s.expert)
            took -= self.kernel + share * moved / (memory * GIGA)
            found.append((2.0 * x.numel() * s.expert, float(w.numel()), max(took, solve.LEAST)))
        rate, tile = solve.grouped(found[0], found[1], most=tflops)
        return {"grouped_tflops": rate, "grouped_tile": tile}

    def attention(self) -> list[list[float]]:
        """Return a row per head width and length: TFLOP/s of the fastest and deterministic kernel.

        Each measures as many tokens as a microbatch has: with more, the tail in which few SMs are
        busy would weigh less than it does in training.
        """
        s = self.sizes
        table = []
        for width, length in product(s.widths, s.sequences):
            count = max(1, s.tokens // length)
            heads = [self.random(count, length, s.heads, width) for _ in range(3)]
            flops = 2.0 * count * length**2 * s.heads * width
            row = [float(width), float(length)]
            for ordered in (False, True):
                attend = TorchAttention(ordered)
                run = partial(attend, window=None, documents=None, scale=None)
                forward, backward = self.clock.passes(run, heads)
                row.append(solve.rate(flops, forward, self.kernel, unit=TERA))
                row.append(solve.rate(2 * flops, backward, self.kernel, unit=TERA))
            table.append(row)
        return table

    def activation(self) -> list[float]:
        """Measure SwiGLU: forward reads 2F and writes F per row, backward reads 3F, writes 2F."""
        both = self.random(self.sizes.tokens, 2 * self.sizes.hidden)
        size = both.numel() // 2 * SIZE
        return self.both(3 * size, 5 * size, self.clock.passes(swiglu, [both]))

    def norm(self) -> list[float]:
        """Measure RMSNorm: forward reads and writes once, backward reads twice and writes once."""
        x = self.random(self.sizes.tokens, self.sizes.hidden)
        module = _norm(x)
        size = x.numel() * SIZE
        return self.both(2 * size, 3 * size, self.clock.passes(module, [x]))

    def heads(self) -> list[float]:
        """Measure the split of QKV into heads with RoPE; without Triton, RoPE in plain torch."""
        s = self.sizes
        width = s.widths[-1]
        qkv = self.random(1, s.tokens, 3 * s.heads * width)
        angles = torch.rand(1, s.tokens, 1, width, device=qkv.device)
        tables = angles.cos(), angles.sin()

        def rotate(x: Tensor) -> Outputs:
            if usable(x):
                return split_and_rotate(
                    x, *tables, num_kv_heads=s.heads, queries_per_kv=1, norms=None
                )
            heads = x.unflatten(2, (-1, width))
            rotated: Tensor = heads * tables[0] + heads.roll(width // 2, 3) * tables[1]
            return rotated.to(x.dtype)

        size = qkv.numel() * SIZE
        return self.both(2 * size, 2 * size, self.clock.passes(rotate, [qkv]))

    def loss(self) -> list[float]:
        """Measure cross-entropy: forward reads the logits, backward reads and writes them."""
        s = self.sizes
        logits = self.random(s.tokens // 2, s.vocab)
        row = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        size = logits.numel() * SIZE
        if not usable(logits):
            forward = self.clock.seconds(lambda: torch.logsumexp(logits, dim=1))
            return self.both(size, 2 * size, (forward, 2 * forward))
        ones = torch.ones(len(row), device=row.device)
        forward = self.clock.seconds(lambda: cross_entropy.statistics(logits, row))
        backward = self.clock.seconds(
            lambda: cross_entropy.into_gradient(logits, row, 20 * ones, weight_C=ones)
        )
        return self.both(size, 2 * size, (forward, backward))

    def rows(self) -> list[float]:
        """Measure permute and combine of tokens with K experts each, as the mean of both."""
        s = self.sizes
        x = self.random(s.tokens // 2, s.hidden)
        scores = torch.rand(len(x), s.experts, device=x.device)
        probs, chosen = scores.topk(s.top_k, dim=1)
        permutation = sort_by_expert(chosen, s.experts)
        permuted = self.clock.passes(lambda x: permute(x, permutation), [x])
        rows = permute(x, permutation)
        combined = self.clock.passes(lambda rows: combine(rows, probs, permutation), [rows])
        one, all_rows = x.numel() * SIZE, rows.numel() * SIZE
        # two kernels each way
        times = [out + back - self.kernel for out, back in zip(permuted, combined, strict=True)]
        return self.both(2 * (one + all_rows), 2 * one + 3 * all_rows, times)

    def other(self) -> list[float]:
        """Measure a residual add: two reads, one write; its backward counts as another one."""
        x = self.random(self.sizes.tokens, 4 * self.sizes.hidden)
        y = torch.empty_like(x)
        took = self.clock.seconds(lambda: torch.add(x, x, out=y))
        return self.both(2 * x.numel() * SIZE, 2 * x.numel() * SIZE, (took, took))

    def sums(self, tflops: float, share: float, memory: float) -> float:
        """Measure by how much adding to a float32 main gradient prolongs a weight-gradient GEMM.

        The time that the plan gives the GEMM alone is subtracted.
        """
        s = self.sizes
        tokens, made = s.tokens // 2, 4 * s.hidden
        grad, x = self.random(tokens, made), self.random(tokens, s.hidden)
        total = torch.zeros(made, s.hidden, device=x.device)
        took = self.clock.seconds(lambda: add_gemm(total, grad.mT, x))
        read = SIZE * (grad.numel() + x.numel())
        took -= 2.0 * grad.numel() * s.hidden / (tflops * TERA) + share * read / (memory * GIGA)
        # bounded, since noise may suggest that the GEMM hides all of it
        least = 8.0 * total.numel() / (SUMS_MOST * memory * GIGA)
        return solve.rate(8.0 * total.numel(), max(took - self.kernel, least), 0.0)

    def optimizer(self) -> float:
        """Measure AdamW on float32 parameters with a 16-bit copy: 30 bytes per parameter.

        Without our kernel torch's fused AdamW is measured.
        """
        count, device = self.sizes.adam, self.clock.device
        main, exp_avg, exp_avg_sq = (torch.zeros(count, device=device) for _ in range(3))
        grad, rounded = torch.ones_like(main), main.bfloat16()
        if not usable(main):
            main.requires_grad_().grad = grad
            update = torch.optim.AdamW([main], fused=True)
            update.step()
            return solve.rate(28.0 * count, self.clock.seconds(update.step), self.kernel)
        one = torch.ones((), device=device)
        step = partial(
            adamw_update,
            main,
            grad,
            (exp_avg, exp_avg_sq),
            rounded_N=rounded,
            slices=ShardSlices.of([(0, count, True)], device),
            rates_2=update_rates(1e-3, 0.1, device),
            step=one,
            divisor=one,
            skip=torch.zeros_like(one),
            settings=AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8),
        )
        return solve.rate(30.0 * count, self.clock.seconds(step), self.kernel)

    def host(self) -> float:
        """Measure copies to page-locked host memory."""
        x = torch.zeros(self.sizes.adam, device=self.clock.device)
        to = torch.empty(x.shape, pin_memory=x.is_cuda)
        copy = partial(to.copy_, x, non_blocking=True)
        return solve.rate(4.0 * x.numel(), self.clock.seconds(copy), self.kernel)

    def launch(self) -> float:
        """Return the launch time per kernel of tiny blocks of norm, GEMM and activation."""
        norm = _norm(self.random(2, 64))

        def blocks(x: Tensor, w: Tensor) -> Tensor:
            for _ in range(BLOCKS):
                x = swiglu(F.linear(norm(x), w))
            return x

        inputs = self.random(2, 64), self.random(128, 64)
        return self.clock.launch(blocks, inputs, kernels=BLOCKS * KERNELS)
