"""Measured speeds of one kind of GPU, from which plans estimate the time of a step."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from app.choices import Fp8Recipe
from app.errors import ConfigError
from app.hashed import hashed_once

FORMAT = 2  # of the keys below; 2 has attention by sequence length, and speeds under power limits
SCALED = "scaled from"  # start of the source of a profile that was scaled, not measured
HOST_GB_S = 55.0  # over PCIe 5.0 x16, measured on an H200
ATTENTION = 6  # numbers in a row of HardwareProfile.attention
FASTEST = 100_000.0  # TFLOP/s or GB/s: larger values are typing errors
PAIRS = ("activation_gb_s", "heads_gb_s", "norm_gb_s", "loss_gb_s", "rows_gb_s", "other_gb_s")
LONGEST = 10_000.0  # of the times and counts below: larger values are typing errors
SHARES = ("hidden", "gemm_memory")
TIMES = ("grouped_tile", "kernel_us", "launch_us", "step_ms", "collective_us", "send_us")


@hashed_once
@dataclass(frozen=True)
class HardwareProfile:
    """Measured speeds of one kind of GPU, its host and its links, for 16-bit elements.

    Pairs are (forward, backward). A kernel takes `kernel_us` from the end of the previous one, and
    then the time of its bytes or its operations.
    """

    format: int  # version of these keys: 2
    gpu: str  # words of the name that the GPU's driver reports: H200
    source: str  # when and with what it was measured, or what it was scaled from
    gemm_tflops: float  # of large GEMMs, TFLOP/s
    sustained_tflops: float  # of GEMMs without pause, where power limits clocks, TFLOP/s
    # share of the time of a GEMM's memory traffic that its compute does not hide
    gemm_memory: float
    router_tflops: float  # of the router GEMM, bf16 with fp32 accumulation and gradients, TFLOP/s
    grouped_tflops: float  # of grouped GEMMs on full tiles, TFLOP/s
    grouped_tile: float  # mean rows of padding that an expert's GEMMs compute in a partial tile
    # a row per head width and length: head width; tokens of a sequence; TFLOP/s of the fastest
    # kernel, forward and backward, and of the deterministic one, likewise; causal, counted as two
    # half GEMMs forward and four backward
    attention: Any
    activation_gb_s: tuple[float, ...]  # SwiGLU
    heads_gb_s: tuple[float, ...]  # heads split and rotated
    norm_gb_s: tuple[float, ...]  # RMSNorm
    loss_gb_s: tuple[float, ...]  # cross-entropy of logits
    rows_gb_s: tuple[float, ...]  # permutation of tokens to experts and back
    other_gb_s: tuple[float, ...]  # residual additions and everything else
    sums_gb_s: float  # of accumulating weight gradients in float32, 8 bytes per weight
    optimizer_gb_s: float  # of AdamW, 30 bytes per parameter of a rank
    kernel_us: float  # from the end of a kernel to the start of the next one
    launch_us: float  # host time of an eager kernel launch, with the Python around it
    step_ms: float  # between steps: batches, norm, report
    collective_us: float  # latency of a collective before its bytes move
    ring_gb_s: float  # of all-gathers and reduce-scatters inside a node, GB/s that a rank sends
    all_to_all_gb_s: float  # of all-to-alls inside a node
    peer_gb_s: float  # of kernels that load and store other GPUs' memory in a node
    send_us: float  # latency of a send between pipeline ranks
    send_gb_s: float  # of such sends inside a node
    hidden: float  # share of an overlapped collective that costs no time, 0 to 1
    host_gb_s: float = HOST_GB_S  # of copies to page-locked host memory; those back count the same
    # of large FP8 GEMMs, without quantizing; null: not measured, and plans assume a speedup over
    # 16 bits
    fp8_current_tflops: float | None = None  # recipe current
    fp8_delayed_tflops: float | None = None  # recipe delayed
    fp8_block_tflops: float | None = None  # recipe block
    fp8_quantise_gb_s: float | None = None  # of quantizing, 4 to 6 bytes per element of 16 bits
    fp8_grouped_tflops: float | None = None  # of grouped GEMMs, one scale per row

    @property
    def scaled(self) -> bool:
        """True if the profile was scaled from another one, not measured."""
        return self.source.startswith(SCALED)

    @property
    def origin(self) -> str:
        """Name the profile that it was scaled from, without the numbers."""
        return re.split(r"[.,]", self.source)[0]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            rule = f"this version reads profiles of format {FORMAT}"
            raise ConfigError(
                "hardware.profile.format", self.format, rule, advice="measure the GPU again"
            )
        self._freeze_attention()
        for field in fields(self):
            if field.name.endswith(("_gb_s", "_tflops")) or field.name == "attention":
                self._check_rates(field.name)
        if self.sustained_tflops > self.gemm_tflops:
            key = "hardware.profile.sustained_tflops"
            rule = f"must be at most gemm_tflops={self.gemm_tflops:g}, the speed of a single GEMM"
            raise ConfigError(key, self.sustained_tflops, rule, nearest=self.gemm_tflops)
        self._check_fp8()
        for names, most in ((TIMES, LONGEST), (SHARES, 1.0)):
            for name in names:
                if not 0 <= getattr(self, name) <= most:
                    key = f"hardware.profile.{name}"
                    raise ConfigError(key, getattr(self, name), f"must be from 0 to {most:,.0f}")

    def check_peak(self, peak_tflops: float) -> None:
        """Raise ConfigError for a speed above the data sheet's 16-bit peak, or twice that for
        FP8.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            rows = [row[2:] for row in value] if field.name == "attention" else [(value,)]
            if not field.name.endswith("_tflops") and field.name != "attention":
                continue
            most = peak_tflops * (2 if field.name.startswith("fp8_") else 1)
            if any(rate is not None and rate > most for row in rows for rate in row):
                rule = f"is more than the data sheet's peak (hardware.peak_tflops={peak_tflops:g})"
                advice = f"at most {most:g}"
                raise ConfigError(f"hardware.profile.{field.name}", value, rule, advice=advice)

    def _freeze_attention(self) -> None:
        try:
            rows = tuple(tuple(map(float, row)) for row in self.attention)
        except (TypeError, ValueError):
            rows = ()
        if not rows or any(len(row) != ATTENTION for row in rows):
            raise ConfigError(
                "hardware.profile.attention",
                self.attention,
                "needs rows of a head width, a length and four TFLOP/s",
                advice="[[128, 4096, 509, 366, 306, 194]], for example",
            )
        object.__setattr__(self, "attention", tuple(sorted(rows)))

    def _check_fp8(self) -> None:
        known = any(getattr(self, f"fp8_{recipe.value}_tflops") for recipe in Fp8Recipe)
        if known and self.fp8_quantise_gb_s is None:
            rule = "is needed beside the speeds of FP8 GEMMs"
            raise ConfigError("hardware.profile.fp8_quantise_gb_s", None, rule, nearest=3000.0)

    def _check_rates(self, name: str) -> None:
        """Raise ConfigError for impossible speeds; convert pairs and tables to tuples."""
        key = f"hardware.profile.{name}"
        value = getattr(self, name)
        if value is None:
            return
        if name in PAIRS:
            value = tuple(value)
            object.__setattr__(self, name, value)
            if len(value) != 2:
                raise ConfigError(key, list(value), "must be a pair, of forward and backward")
        rows = value if name == "attention" else [value if name in PAIRS else (value,)]
        if any(not 0 < rate <= FASTEST for row in rows for rate in row):
            rule = f"no GPU or link has that: speeds are above 0 and at most {FASTEST:,.0f}"
            raise ConfigError(key, value, rule)
