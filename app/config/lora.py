"""Low-rank adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.choices import BaseKind
from app.config.bounds import above_zero, at_least
from app.errors import ConfigError


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, trained in place of the model (LoRA, arXiv 2106.09685)."""

    rank: int | None = None  # width of the adapters; null: none, the model itself is trained
    alpha: float = 32.0  # adapters' outputs are multiplied by alpha / rank
    rslora: bool = False  # adapters' outputs are multiplied by alpha / √rank (arXiv 2312.03732)
    # share of adapters' inputs that training drops; 0 beside experts and routers
    dropout: float = 0.0
    # linear layers with adapters, by parts of their paths: q_proj, self_attn, linear_attn,
    # mlp.experts, and for routers gate; []: all but routers
    targets: tuple[str, ...] = ()
    # type in which frozen linear layers are held and dequantised for each GEMM; null:
    # precision.params
    base: BaseKind | None = None
    init_from: str | None = None  # folder of an adapter that `peft` saved; null: fresh adapters

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        at_least("lora", self, 1, "rank")
        above_zero("lora", self, "alpha")
        at_least("lora", self, 0, "dropout")
        if self.dropout >= 1:
            raise ConfigError("lora.dropout", self.dropout, "must be below 1", nearest=0.05)

    @property
    def scale(self) -> float:
        """Factor of the adapters' outputs."""
        assert self.rank is not None, "a run with adapters has a rank"
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
