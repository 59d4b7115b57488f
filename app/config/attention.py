"""Kinds of attention and of rotary positions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of a model: how many values of a head they turn, and how fast."""

    width: int
    theta: float  # base of the frequencies
