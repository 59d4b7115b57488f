"""Version of this program: the package's, and the git commit of the checkout that it runs from or
was installed from.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app import __version__

PACKAGE = Path(__file__).parent
VERSION = "graphfold"  # key of the version in plan.json and in checkpoint manifests
RECORD = "commit.json"  # file of an installed package: the record of its checkout, by setup.py
SHORT = 10  # digits of a commit shown to people
TIMEOUT_S = 5.0  # limit for one git command, seconds
# Variables that may point git at another repository.
OTHERS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR",
          "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE")  # fmt: skip
# Write nothing into the repository, and start no helper programs.
GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


@dataclass(frozen=True, slots=True)
class Version:
    """Version of the program that wrote a record."""

    version: str  # of the package
    commit: str | None  # of the checkout, 40 digits; None if there is none or git cannot tell
    dirty: bool | None  # tracked files of the checkout differ from that commit

    @classmethod
    def of(cls, package: Path = PACKAGE) -> Version:
        """Return the version of the package in a folder.

        Counts only a repository that tracks the package, not one around its installation. Calls
        git, which takes some milliseconds. Otherwise the commit is that of RECORD, or unknown.
        """
        found = _git(package, "rev-parse", "HEAD", "HEAD:./__init__.py")
        changes = _git(package, "status", "--porcelain", "--untracked-files=no", "--", "..")
        if found is None or changes is None:
            return cls(__version__, *_recorded(package))
        return cls(__version__, found.split()[0], bool(changes))

    def __str__(self) -> str:
        return self._text(None)

    @property
    def short(self) -> str:
        """Text with the commit cut to SHORT digits."""
        return self._text(SHORT)

    def _text(self, digits: int | None) -> str:
        if self.commit is None:
            return f"{self.version}, commit not known"
        changes = ", with uncommitted changes" if self.dirty else ""
        return f"{self.version}, commit {str(self.commit)[:digits]}{changes}"

    def record(self) -> dict[str, Any]:
        """Return the version for JSON files."""
        return asdict(self)

    def change_since(self, record: object) -> str | None:
        """Return the difference to what `record()` once returned, as text.

        None if there is no difference or `record` is no version. An unknown commit counts as
        another one.
        """
        if not isinstance(record, dict) or record == self.record():
            return None
        before = Version(str(record.get("version")), record.get("commit"), record.get("dirty"))
        return f"graphfold: {before.short} -> {self.short}"


def _recorded(package: Path) -> tuple[str | None, bool | None]:
    """Return commit and dirty flag of a package's RECORD; None for each if it has none."""
    try:
        found = json.loads((package / RECORD).read_text(encoding="utf-8"))
        commit, dirty = found["commit"], found["dirty"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
    known = isinstance(commit, str) and isinstance(dirty, bool)
    return (commit, dirty) if known else (None, None)


def _git(folder: Path, *command: str) -> str | None:
    """Return what git prints in a folder; None if it fails or is missing."""
    unset = (word for name in OTHERS for word in ("-u", name))
    # Git refuses a checkout of another user, as in containers; its code already runs here.
    ours = f"safe.directory={folder.resolve().parent}"
    line = ("env", *unset, *GIT, "-c", ours, "-C", str(folder), *command)
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
