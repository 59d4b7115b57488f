"""Shared by test_config.py and other tests."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from app.cli.options.compose import load_run, register_schema
from app.config import Run

ROOT = Path(__file__).parent.parent


CONF = ROOT / "conf"


def load(*overrides: str, world_size: int | None = None) -> Run:
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load_run(compose("train", list(overrides)), world_size)
