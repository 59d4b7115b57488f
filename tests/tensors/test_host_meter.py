"""A host's cores as /proc tells them, from a folder with the same files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from app.engine.report import host
from app.engine.report.host import HostMeter, read_host

TICK = os.sysconf("SC_CLK_TCK")


def written(proc: Path, busy_s: float, delays: dict[str, float], idle_s: float = 0.0) -> None:
    """Write /proc: cores were busy for so long, and threads waited so long for one."""
    others = (0, 0, 0, int(idle_s * TICK), int(idle_s * TICK), 0, 0, 0, 5, 5)
    ticks = [int(busy_s * TICK) + others[0], *others[1:]]
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\n")
    own = threading.get_native_id()
    for number, (name, seconds) in enumerate(delays.items()):
        task = proc / "self" / "task" / str(own + number)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"123 {int(1e9 * seconds)} 7\n")
        (task / "comm").write_text(f"{name}\n")


def test_waits_and_busy_cores_are_those_since_the_last_lap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = {"wall": 100.0, "own": 5.0}
    monkeypatch.setattr(host.time, "monotonic", lambda: now["wall"])
    monkeypatch.setattr(host.time, "process_time", lambda: now["own"])
    written(tmp_path, 1000.0, {"python": 3.0, "pt_autograd_0": 1.0, "wandb": 50.0})
    meter = HostMeter(tmp_path)
    now |= {"wall": 110.0, "own": 15.0}
    after = {"python": 5.0, "pt_autograd_0": 1.5, "wandb": 80.0}
    written(tmp_path, 1040.0, after, idle_s=9.0)
    assert meter.lap() == pytest.approx((2.5, 1.0, 4.0))
    assert meter.lap()[0] == 0.0


def test_hosts_without_these_files_are_not_known(tmp_path: Path):
    found = read_host(tmp_path)
    assert found.busy is None and found.delayed is None
    assert HostMeter(tmp_path).lap()[0] is None
    (tmp_path / "stat").write_text("cpu  no numbers\n")
    assert read_host(tmp_path).busy is None
