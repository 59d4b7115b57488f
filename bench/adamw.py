"""One update of AdamW on a GPU: our kernel beside torch's fused one with a copy to bf16 behind it.

    python bench/adamw.py [--elements 268435456] [--grads float32] [--json FILE]

ms (median, and from the 10th to the 90th percentile of the repeats), and GB/s of what must be read
and written: fp32 parameter and moments twice, the gradient, the bf16 parameter. Ours also with
moments in bf16.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from timing import gpu_time
from torch.optim.adamw import adamw

from app.kernels.adamw import AdamWSettings, ShardSlices, adamw_update, update_rates

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8)
LR, WEIGHT_DECAY = 1e-3, 0.1


def main() -> None:
    """Print a line for each, and save them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 28)
    parser.add_argument("--grads", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args()
    device, count = torch.device("cuda"), given.elements
    main_N, exp_avg, exp_avg_sq = (torch.rand(count, device=device) for _ in range(3))
    grad = torch.randn(count, device=device).to(getattr(torch, given.grads))
    rounded = main_N.bfloat16()
    step, divisor, skip = (torch.tensor(value, device=device) for value in (3.0, 1.5, 0.0))
    rates_2 = update_rates(LR, WEIGHT_DECAY, device)
    slices = ShardSlices.of([(0, count, True)], device)

    def ours(*moments: torch.Tensor) -> None:
        adamw_update(
            main_N,
            grad,
            moments,
            rounded_N=rounded,
            slices=slices,
            rates_2=rates_2,
            step=step,
            divisor=divisor,
            skip=skip,
            settings=SETTINGS,
        )

    def theirs() -> None:
        adamw(
            [main_N],
            [grad.float()],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step.clone()],
            fused=True,
            grad_scale=divisor,
            found_inf=skip,
            amsgrad=False,
            maximize=False,
            beta1=SETTINGS.beta1,
            beta2=SETTINGS.beta2,
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            eps=SETTINGS.eps,
        )
        rounded.copy_(main_N)

    wide = exp_avg, exp_avg_sq
    narrow = tuple(each.bfloat16() for each in wide)
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {count:,} elements")
    for way, call, of_moments in (
        ("ours", partial(ours, *wide), 4),
        ("ours, bf16 moments", partial(ours, *narrow), 2),
        ("torch", theirs, 4),
    ):
        moved = count * (2 * 4 + 4 * of_moments + grad.itemsize + 2)
        ms, spread = gpu_time(call)
        rows.append({"way": way, "grads": given.grads, "ms": ms, "spread": spread})
        rows[-1]["gb_s"] = moved / ms / 1e6
        print(f"{way:20}{ms:8.3f} ms, spread {spread:.3f} {rows[-1]['gb_s']:8,.0f} GB/s")
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
