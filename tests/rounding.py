"""How far two computations in fp32 may be apart: no number here is what one machine has shown.

A difference that another processor, another order of sums or another layout makes is bounded by
the error of plain fp32 against fp64 (`expect_alike`), or by the number of terms and the size of
what is summed (`expect_sums`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import app.engine.ranks.dtypes
import app.optim.adam
from app.choices import Dtype

Values = Mapping[str, Any]  # tensors, arrays or numbers by name
FP32 = torch.float32
EPS = torch.finfo(FP32).eps
# How much further from fp64 one order of sums may be than another. The error of a tensor is the
# largest of many independent roundings, so two orders have nearly the same: in all tests at most
# twice.
SPREAD = 8
HALF = (
    2**-11
)  # to which fp16 and TF32 round: a reference that is this far off says nothing about fp32


def error(found: Any, exact: Any) -> float:
    """Largest difference, in parts of the largest exact entry."""
    ours, wanted = (torch.as_tensor(values).detach().double() for values in (found, exact))
    assert ours.shape == wanted.shape, f"{tuple(ours.shape)}, wanted {tuple(wanted.shape)}"
    if torch.equal(ours, wanted):
        return 0.0
    return ((ours - wanted).abs().max() / wanted.abs().max()).item()


def expect_alike(found: Values, plain: Values, exact: Values, case: object = "") -> None:
    """`found` is as near to `exact` (fp64) as `plain`, the same by other operations in fp32.

    The values of one call share one error, the largest of `plain`: give together what has gone
    through the same sums.
    """
    assert found.keys() == plain.keys() == exact.keys(), case
    noise = max([EPS, *(error(plain[name], value) for name, value in exact.items())])
    assert noise < HALF, (
        f"{case}: fp32 is {noise:.1e} off: fewer bits are used, or rounding chose an expert"
    )
    _expect(found, exact, SPREAD * noise, case=case)


def expect_sums(
    found: Values, exact: Values, terms: int, case: object = "", dtype: torch.dtype = FP32
) -> None:
    """Every entry is a sum of at most `terms` products, none larger than the largest entry."""
    assert found.keys() == exact.keys(), case
    _expect(found, exact, terms * torch.finfo(dtype).eps, case=case)


def _expect(found: Values, exact: Values, bound: float, case: object) -> None:
    errors = {name: error(found[name], value) for name, value in exact.items()}
    far = {name: apart for name, apart in errors.items() if not apart <= bound}  # nor is NaN
    assert not far, (
        f"{case}: apart by {far} of the largest entry, where rounding explains {bound:.1e}"
    )


def numbered(values: Any) -> dict[str, Any]:
    """Values of a sequence, by position."""
    return {str(number): value for number, value in enumerate(values)}


def plain_and_exact(
    compute: Callable[..., Any], *given: Tensor | nn.Module
) -> tuple[Values, Values]:
    """Results of a function of fp32 tensors or modules, by position: in fp32, and in fp64."""
    with in_fp64():
        exact = numbered(compute(*(copy.deepcopy(value).double() for value in given)))
    return numbered(compute(*given)), exact


@contextmanager
def in_fp64() -> Iterator[None]:
    """Within the block what the code makes fp32 is fp64: engines built there train in fp64."""
    adamw, dtypes = app.optim.adam.adamw, app.engine.ranks.dtypes.DTYPES

    def update(params: Any, grads: list[Tensor], *state: Any, **options: Any) -> None:
        """The fused kernel divides gradients in place, and takes divisor and flag in fp32 only."""
        divisor, skip = options.pop("grad_scale"), options.pop("found_inf").to(FP32)
        adamw(
            params,
            [grad.div_(divisor) for grad in grads],
            *state,
            grad_scale=None,
            found_inf=skip,
            **options,
        )

    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(Tensor, "float", Tensor.double),
        patch.object(F, "grouped_mm", grouped_mm),
        patch.object(app.optim.adam, "adamw", update),
        patch.dict(dtypes, {Dtype.float32: torch.float64}),
    ):
        yield


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm`, which has no fp64, as the loop that it stands for."""
    ends = offs.tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if b.dim() == 2:  # both are cut along the dimension that is summed
        return torch.stack([a[:, part] @ b[part] for part in parts])
    left = a.new_zeros(len(a) - ends[-1], b.shape[2])
    return torch.cat([*(a[part] @ own for part, own in zip(parts, b, strict=True)), left])
