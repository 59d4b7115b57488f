"""The package as `pip install .` leaves it, for tests of its files and commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (
    "app",
    "conf",
    "docs",
    "graphfold",
    "hydra_plugins",
    "scripts",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "setup.py",
)


def normal(distribution: str) -> str:
    """The name of a distribution as an index knows it."""
    return re.sub("[-_.]+", "-", distribution).lower()


def build_wheel(folder: Path, *, commit: bool = False) -> Path:
    """Build the wheel of these sources into `folder`, from a copy: a build leaves folders beside
    them. With `commit` the copy is a git checkout.
    """
    copy, out = folder / "sources", folder / "wheel"
    copy.mkdir()
    for name in SOURCES:
        path, ignored = ROOT / name, shutil.ignore_patterns("__pycache__")
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=ignored)
        else:
            shutil.copy(path, copy)
    for command in ("init", "add .", "commit --message=first") if commit else ():
        own = ("-c", "user.name=x", "-c", "user.email=x@y")
        line = ["git", *own, *command.split()]
        subprocess.run(line, cwd=copy, check=True, capture_output=True)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def install(wheel: Path, place: Path) -> Path:
    """Install the wheel into a fresh environment, which borrows what the wheel depends on; return
    the folder of its programs.
    """
    venv.create(place, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    # Of a folder named there, .pth files do not count: what is installed as editable is not
    # borrowed.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    subprocess.run([*pip, *options, str(wheel)], check=True)
    assert (packages / "app" / "conf" / "train.yaml").exists()
    return place / "bin"
