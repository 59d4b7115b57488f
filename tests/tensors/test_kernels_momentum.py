"""The kernels around an update of matrices against torch's formulas in fp64."""

from __future__ import annotations

import pytest
import torch

from app.kernels import momentum
from app.kernels.adamw import update_rates
from app.kernels.momentum import MovedSlice, MovedSlices, apply_updates, push_momentum

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLICES = [
    MovedSlice(0, 700, 16, 0.5),
    MovedSlice(704, 1500, 720, 2.0),
    MovedSlice(1503, 1504, 5, 3),
]
COUNT, PLACES = 1600, 1520
DECAY, RATES, DIVISOR = 0.95, (0.02, 0.1), 2.5
EPS = torch.finfo(torch.float32).eps


def drawn(seed: int, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


@pytest.fixture(params=[256, 4096], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of several programs, and of less than one block."""
    monkeypatch.setattr(momentum, "BLOCK", request.param)
    monkeypatch.setattr(momentum, "CHUNK", 2 * request.param)


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16], ids=str)
def test_momentum_and_look_ahead(grads: torch.dtype, skip: float):
    moment, grad, out = drawn(0), drawn(1).to(grads), drawn(2, PLACES)
    wanted, ahead = moment.double(), out.double()
    for start, stop, place, _ in SLICES if not skip else ():
        new = grad[start:stop].double() / DIVISOR
        wanted[start:stop].lerp_(new, 1 - DECAY)
        ahead[place : place + stop - start] = new.lerp(wanted[start:stop], DECAY)
    push_momentum(
        moment,
        grad,
        out,
        slices=MovedSlices.of(SLICES, DEVICE),
        decay=DECAY,
        divisor=scalar(DIVISOR),
        skip=scalar(skip),
    )
    assert (moment.double() - wanted).abs().max() <= 8 * EPS * wanted.abs().max()
    assert (out.double() - ahead).abs().max() <= 8 * EPS * ahead.abs().max()


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("updates", [torch.float32, torch.bfloat16], ids=str)
def test_decay_and_update(updates: torch.dtype, skip: float):
    main, update = drawn(0), drawn(1, PLACES).to(updates)
    rounded = torch.full_like(main, 7, dtype=torch.bfloat16)
    wanted, kept = main.double(), rounded.clone()
    lr, decay = RATES
    for start, stop, place, scale in SLICES if not skip else ():
        wanted[start:stop].mul_(1 - lr * decay)
        wanted[start:stop].sub_(update[place : place + stop - start].double() * lr * scale)
    apply_updates(
        main,
        update,
        rounded,
        slices=MovedSlices.of(SLICES, DEVICE),
        rates_2=update_rates(*RATES, DEVICE),
        skip=scalar(skip),
    )
    assert (main.double() - wanted).abs().max() <= 8 * EPS * wanted.abs().max()
    for start, stop, *_ in SLICES if not skip else ():
        kept[start:stop] = main[start:stop].bfloat16()
    # the interpreter cuts digits off
    torch.testing.assert_close(rounded, kept, rtol=0 if main.is_cuda else 2**-7, atol=0)
