"""Learning rate as a function of the step: plain floats, no state, no torch.

`step` is 0 before the first update, n for the n-th. `learning_rate` on plain numbers serves
parameter groups with a peak or minimum of their own; `lr_at` reads a run.
"""

from __future__ import annotations

import math

from app.choices import Decay, WsdDecay
from app.config import Run


def lr_at(step: int, run: Run) -> float:
    """Return the learning rate at update `step`, counted from 1."""
    config = run.optim
    return learning_rate(
        step,
        peak=config.lr,
        low=config.min_lr,
        warmup_steps=run.warmup_steps,
        decay_steps=run.decay_steps,
        decay=config.decay,
        wsd_steps=run.wsd_decay_steps,
        wsd_decay=config.wsd_decay,
    )


def learning_rate(
    step: int,
    *,
    peak: float,
    low: float,
    warmup_steps: int,
    decay_steps: int,
    decay: Decay,
    wsd_steps: int,
    wsd_decay: WsdDecay,
) -> float:
    """Return the rate: linear from 0 to `peak` over `warmup_steps`, then `decay` to `low` at
    step `decay_steps`, then `low`.

    Constant decay stays at `peak`. Inverse square root is peak·√(warmup_steps / step), never below
    `low` (Vaswani et al. 2017). Needs warmup_steps < decay_steps.
    """
    if warmup_steps > 0 and step <= warmup_steps:
        return peak * step / warmup_steps
    if decay is Decay.constant:
        return peak
    if step > decay_steps:
        return low
    if decay is Decay.inverse_square_root:
        return max(low, peak * math.pow(max(warmup_steps, 1), 0.5) / math.pow(max(step, 1), 0.5))
    if decay is Decay.wsd:
        into = step - (decay_steps - wsd_steps)
        return low + (peak - low) * _wsd_share(into, wsd_steps, wsd_decay)
    done = (step - warmup_steps) / (decay_steps - warmup_steps)
    return low + (peak - low) * (_half_cosine(done) if decay is Decay.cosine else 1 - done)


def _wsd_share(step: int, steps: int, shape: WsdDecay) -> float:
    """Return the share of (peak - low) left `step` steps into WSD's decay of `steps` (Hu et al.
    2024).
    """
    if step <= 0:
        return 1.0
    done = step / steps
    match shape:
        case WsdDecay.linear:
            return 1 - done
        case WsdDecay.cosine:
            return _half_cosine(done)
        case WsdDecay.exponential:
            return 2 * math.pow(0.5, done) - 1
        case WsdDecay.minus_sqrt:
            return 1 - math.sqrt(done)


def _half_cosine(done: float) -> float:
    """Return 1 at 0, falling along half a cosine to 0 at 1."""
    return 0.5 * (math.cos(math.pi * done) + 1)
