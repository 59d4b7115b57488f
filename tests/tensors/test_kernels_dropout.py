"""Kernel of dropout by hashes beside plain torch."""

from __future__ import annotations

import pytest
import torch

from app.kernels import hashed_dropout
from app.kernels.hashed_dropout import dropped, mixed, most_of

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("keep", [0.75, 1 - 1e-12])
def test_kernel_drops_what_torch_drops(keep: float, monkeypatch: pytest.MonkeyPatch):
    """Sizes that divide by no tile; keys that are part of longer rows."""
    generator = torch.Generator().manual_seed(0)
    x_BsI = torch.randn(2, 13, 700, generator=generator).to(DEVICE)
    keys_BS = mixed(torch.arange(2 * 20, dtype=torch.int32).view(2, 20)).to(DEVICE)
    channels_I = mixed(torch.arange(700, dtype=torch.int32)).to(DEVICE)
    given = x_BsI, keys_BS[:, 5:18], channels_I, most_of(keep)
    monkeypatch.setattr(hashed_dropout, "usable", lambda x: True)
    found = dropped(*given)
    monkeypatch.setattr(hashed_dropout, "usable", lambda x: False)
    wanted = dropped(*given)
    assert torch.equal(found, wanted)
    assert (found == 0).float().mean().item() == pytest.approx(1 - keep, abs=0.02)
