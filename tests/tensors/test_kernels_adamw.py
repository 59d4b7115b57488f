"""The kernel of AdamW against torch's in fp64, on a GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from app.kernels import adamw
from app.kernels.adamw import AdamWSettings, ShardSlices, adamw_update, update_rates

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANGES = [(3, 40, True), (40, 41, False), (48, 700, True), (704, 1500, False)]
COUNT = 1600
SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8)
RATES = (0.02, 0.1)  # learning rate, weight decay


@dataclass
class Shard:
    """Tensors that one update reads and writes."""

    main: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    @classmethod
    def drawn(cls, grads: torch.dtype, seed: int = 0) -> Shard:
        generator = torch.Generator().manual_seed(seed)
        main, grad = (torch.randn(COUNT, generator=generator) for _ in range(2))
        zeros = [torch.zeros(COUNT, device=DEVICE) for _ in range(2)]
        return cls(
            main.to(DEVICE), grad.to(DEVICE, grads), *zeros, step=torch.zeros((), device=DEVICE)
        )

    def update(
        self,
        settings: AdamWSettings = SETTINGS,
        rates: tuple[float, float] = RATES,
        divisor: float = 2.5,
        skip: float = 0.0,
        rounded: Tensor | None = None,
    ) -> None:
        adamw_update(
            self.main,
            self.grad,
            (self.exp_avg, self.exp_avg_sq),
            rounded_N=rounded,
            slices=ShardSlices.of(RANGES, self.main.device),
            rates_2=update_rates(*rates, self.main.device),
            step=self.step,
            divisor=torch.tensor(divisor, device=DEVICE),
            skip=torch.tensor(skip, device=DEVICE),
            settings=settings,
        )
        self.step += 1 - skip


def by_torch(
    shard: Shard, gradients: list[Tensor], dtype: torch.dtype, divisor: float
) -> list[Tensor]:
    """Parameters and moments after as many steps by torch's AdamW on a CPU, whole shards with what
    lies between the ranges as it was.
    """
    whole = [x.cpu().to(dtype) for x in (shard.main, shard.exp_avg, shard.exp_avg_sq)]
    for start, stop, decays in RANGES:
        param = whole[0][start:stop].clone().requires_grad_()
        decay = RATES[1] if decays else 0.0
        betas = (SETTINGS.beta1, SETTINGS.beta2)
        optimizer = torch.optim.AdamW([param], RATES[0], betas, SETTINGS.eps, decay)
        for gradient in gradients:
            param.grad = gradient[start:stop].cpu().to(dtype) / divisor
            optimizer.step()
        state = optimizer.state[param]
        found = param.detach(), state["exp_avg"], state["exp_avg_sq"]
        for values, part in zip(whole, found, strict=True):
            values[start:stop] = part
    return whole


@pytest.fixture(params=[256, 4096])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of several slices, of several blocks each, and of less than one."""
    monkeypatch.setattr(adamw, "BLOCK", request.param)
    monkeypatch.setattr(adamw, "CHUNK", 2 * request.param)


@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_torchs(grads: torch.dtype, block: None):
    shard, first = Shard.drawn(grads), Shard.drawn(grads)
    gradients = [Shard.drawn(grads, seed).grad for seed in range(5)]
    for gradient in gradients:
        shard.grad = gradient
        shard.update()
    exact, plain = (
        by_torch(first, gradients, dtype, 2.5) for dtype in (torch.float64, torch.float32)
    )
    found = (shard.main, shard.exp_avg, shard.exp_avg_sq)
    for ours, theirs, wanted in zip(found, plain, exact, strict=True):
        error = (ours.cpu().double() - wanted).abs().max()
        # roundings of a step: of the parameter, which has the largest values, and of its parts
        assert error <= 4 * len(gradients) * torch.finfo(torch.float32).eps * wanted.abs().max()
        assert error <= 8 * (theirs.double() - wanted).abs().max()


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999, 0.9999999])
@pytest.mark.parametrize("updates", [0, 1, 999])
def test_bias_corrections(beta: float, updates: int):
    """With the moments of a constant gradient, corrections undo them: a step of lr."""
    shard = Shard.drawn(torch.float32)
    before = shard.main.clone()
    grad = torch.ones_like(shard.main)
    shard.grad, shard.step = grad, torch.tensor(float(updates), device=DEVICE)
    weight = 1 - beta**updates
    shard.exp_avg, shard.exp_avg_sq = grad * weight, grad * weight
    shard.update(AdamWSettings(beta, beta, 1e-12), rates=(0.5, 0.0), divisor=1.0)
    moved = (before - shard.main)[48:700].double()
    # fp32: 1 - beta has few digits where beta is close to 1, so its own rounding is what counts
    bound = 16 * torch.finfo(torch.float32).eps * max(1.0, float(before.abs().max()) / 0.5)
    assert bool(((moved / 0.5 - 1).abs() <= bound).all())


def test_a_skipped_update_leaves_every_bit():
    shard = Shard.drawn(torch.float32)
    shard.update()
    wanted = [x.clone() for x in (shard.main, shard.exp_avg, shard.exp_avg_sq, shard.step)]
    shard.grad = torch.full_like(shard.grad, float("nan"))
    rounded = torch.full_like(shard.main, 7, dtype=torch.bfloat16)
    shard.update(skip=1.0, divisor=float("nan"), rounded=rounded)
    for found, before in zip(
        (shard.main, shard.exp_avg, shard.exp_avg_sq, shard.step), wanted, strict=True
    ):
        assert torch.equal(found, before)
    assert bool((rounded == 7).all())


def test_rounded_parameters_are_the_rounded_ones():
    """Also from addresses that no vector load begins at; equal updates give equal bits."""
    both = [Shard.drawn(torch.float32) for _ in range(2)]
    kept = []
    for shard in both:
        rounded = torch.zeros(COUNT + 1, dtype=torch.bfloat16, device=DEVICE)[1:]
        shard.update(rounded=rounded)
        kept.append(rounded)
    wanted = both[0].main.bfloat16()
    ours = torch.cat([kept[0][start:stop] for start, stop, _ in RANGES])
    theirs = torch.cat([wanted[start:stop] for start, stop, _ in RANGES])
    if DEVICE == "cuda":
        assert torch.equal(ours, theirs)
    else:  # the interpreter cuts digits off
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)
    outside = torch.ones(COUNT, dtype=torch.bool)
    for start, stop, _ in RANGES:
        outside[start:stop] = False
    assert bool((kept[0].cpu()[outside] == 0).all())
    assert torch.equal(kept[0], kept[1]) and torch.equal(both[0].main, both[1].main)


def test_nothing_to_update():
    empty = torch.zeros(0, device=DEVICE)
    one = torch.ones((), device=DEVICE)
    adamw_update(
        empty,
        empty,
        (empty, empty),
        rounded_N=None,
        slices=ShardSlices.of([], empty.device),
        rates_2=update_rates(*RATES, empty.device),
        step=one,
        divisor=one,
        skip=one,
        settings=SETTINGS,
    )


def test_moments_in_bf16(block: None):
    """Updates are those of fp32 moments, of which only the rounded values are kept."""
    narrow, wide = (Shard.drawn(torch.bfloat16) for _ in range(2))
    narrow.exp_avg, narrow.exp_avg_sq = (torch.zeros_like(narrow.grad) for _ in range(2))
    for seed in range(4):
        for shard in (narrow, wide):
            shard.grad = Shard.drawn(torch.bfloat16, seed).grad
            shard.update()
        assert torch.equal(narrow.main, wide.main)
        for ours, theirs in ((narrow.exp_avg, wide.exp_avg), (narrow.exp_avg_sq, wide.exp_avg_sq)):
            assert ours.dtype is torch.bfloat16
            if DEVICE == "cuda":
                assert torch.equal(ours, theirs.bfloat16())
            else:  # the interpreter cuts digits off
                torch.testing.assert_close(ours.float(), theirs, rtol=2**-7, atol=0)
        wide.exp_avg, wide.exp_avg_sq = narrow.exp_avg.float(), narrow.exp_avg_sq.float()
