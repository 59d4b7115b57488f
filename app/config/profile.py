"""What one kind of GPU was measured to reach: what planned times of a step are made of."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from app.choices import Fp8Recipe
from app.errors import ConfigError

FORMAT = 2  # of the keys below: 2 has lengths of attention and what clocks allow
SCALED = "scaled from"  # how the source of a profile begins that was not measured
ATTENTION = 6  # numbers in a row of HardwareProfile.attention
FASTEST = 100_000.0  # TFLOP/s or GB/s, more than anything reaches
PAIRS = ("activation_gb_s", "heads_gb_s", "norm_gb_s", "loss_gb_s", "rows_gb_s", "other_gb_s")
LONGEST = 10_000.0  # of the times and counts below
SHARES = ("hidden", "gemm_memory")
TIMES = ("grouped_tile", "kernel_us", "launch_us", "step_ms", "collective_us", "send_us")


@dataclass(frozen=True)
class HardwareProfile:
    """Measured speeds of one kind of GPU, its host and its links, for 16-bit elements.

    Pairs are those of forward and backward. Whatever a kernel computes, it takes `kernel_us` from
    the end of the one before, and then its bytes or its operations.
    """

    format: int  # version of these keys: 2
    gpu: str  # words of the name that the GPU's driver reports: H200
    source: str  # when and with what it was measured, or what it was scaled from
    gemm_tflops: float  # of large matrix products, TFLOP/s
    sustained_tflops: float  # of the same without a pause: power limits clocks, TFLOP/s
    gemm_memory: float  # share of the time of a product's bytes that it does not hide
    router_tflops: float  # of a router's products in bf16 with fp32 sums and gradients, TFLOP/s
    grouped_tflops: float  # of experts' products on full tiles, TFLOP/s
    grouped_tile: float  # rows that an expert's products compute for nobody, on average
    # a row per head width and length: width; tokens of a sequence; TFLOP/s of the fastest kernel,
    # forward and backward, and of the ordered one; two products forward, four backward, causal
    # attention half of them
    attention: Any
    activation_gb_s: tuple[float, ...]  # SwiGLU
    heads_gb_s: tuple[float, ...]  # heads split and rotated
    norm_gb_s: tuple[float, ...]  # RMSNorm
    loss_gb_s: tuple[float, ...]  # cross-entropy of logits
    rows_gb_s: tuple[float, ...]  # rows to experts and back
    other_gb_s: tuple[float, ...]  # residual sums and all else
    sums_gb_s: float  # of adding weights' gradients to float32 sums, 8 bytes per weight
    optimizer_gb_s: float  # of AdamW, 30 bytes per parameter of a rank
    kernel_us: float  # from the end of a kernel to the start of the next one
    launch_us: float  # of the host for a kernel that no graph holds, with all it does around it
    step_ms: float  # between steps: batches, norm, report
    collective_us: float  # of a collective before its bytes move
    ring_gb_s: float  # of gathers and reductions inside a node, GB/s that a rank sends
    all_to_all_gb_s: float  # of all-to-alls inside a node
    peer_gb_s: float  # of kernels that read and write the memory of GPUs in a node
    send_us: float  # of a send between pipeline ranks before its bytes move
    send_gb_s: float  # of such sends inside a node
    hidden: float  # share of a collective beside compute that costs no time, 0 to 1
    # large products in FP8, of matrices that have been quantised; null: not measured, and
    # plans say how many times faster they take them for
    fp8_current_tflops: float | None = None  # by the recipe current
    fp8_delayed_tflops: float | None = None  # by the recipe delayed
    fp8_block_tflops: float | None = None  # by the recipe block
    fp8_quantise_gb_s: float | None = None  # of quantising, 4 to 6 bytes per element of 16 bits
    fp8_grouped_tflops: float | None = None  # of experts' products, each row with a scale

    @property
    def scaled(self) -> bool:
        """Whether nobody has measured it: its source says what it was scaled from."""
        return self.source.startswith(SCALED)

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
            rule = f"products without a pause are no faster than single ones ({self.gemm_tflops:g})"
            raise ConfigError(key, self.sustained_tflops, rule, nearest=self.gemm_tflops)
        self._check_fp8()
        for names, most in ((TIMES, LONGEST), (SHARES, 1.0)):
            for name in names:
                if not 0 <= getattr(self, name) <= most:
                    key = f"hardware.profile.{name}"
                    raise ConfigError(key, getattr(self, name), f"must be from 0 to {most:,.0f}")

    def check_peak(self, peak_tflops: float) -> None:
        """ConfigError for what computes faster than a data sheet's peak in 16 bits, or than twice
        that in eight.
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
            rule = "is needed beside speeds of products in FP8"
            raise ConfigError("hardware.profile.fp8_quantise_gb_s", None, rule, nearest=3000.0)

    def _check_rates(self, name: str) -> None:
        """Speeds that something can have; pairs and tables are tuples from here on."""
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
