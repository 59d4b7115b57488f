"""Which program this is: its version, and the git commit of the checkout that it runs from."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app import __version__

PACKAGE = Path(__file__).parent
VERSION = "graphfold"  # key of a version in plan.json and in manifests of checkpoints
SHORT = 10  # digits of a commit where a person reads it
TIMEOUT_S = 5.0  # seconds that git may take
# What a shell may have set for another repository.
OTHERS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR",
          "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE")  # fmt: skip
# Nothing is written into the repository, and none of its programs run.
GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


@dataclass(frozen=True, slots=True)
class Version:
    """What records say of the program that has written them."""

    version: str  # of the package
    commit: str | None  # of the checkout, 40 digits; None: it runs from none, or git cannot tell
    dirty: bool | None  # whether tracked files of the checkout differ from that commit

    @classmethod
    def of(cls, package: Path = PACKAGE) -> Version:
        """The version of the package in a folder.

        Only a repository that tracks the package counts, not one around its installation. Asks git,
        which takes some milliseconds, and says nothing of a commit where there is no git.
        """
        found = _git(package, "rev-parse", "HEAD", "HEAD:./__init__.py")
        changes = _git(package, "status", "--porcelain", "--untracked-files=no", "--", "..")
        if found is None or changes is None:
            return cls(__version__, None, None)
        return cls(__version__, found.split()[0], bool(changes))

    def __str__(self) -> str:
        return self._text(None)

    @property
    def short(self) -> str:
        """As text, with the commit cut."""
        return self._text(SHORT)

    def _text(self, digits: int | None) -> str:
        if self.commit is None:
            return f"{self.version}, commit not known"
        changes = ", with uncommitted changes" if self.dirty else ""
        return f"{self.version}, commit {str(self.commit)[:digits]}{changes}"

    def record(self) -> dict[str, Any]:
        """For JSON files."""
        return asdict(self)

    def change_since(self, record: object) -> str | None:
        """How this differs from what `record` has once returned, as text.

        None: not at all, or `record` is none. A commit that is not known counts as another one.
        """
        if not isinstance(record, dict) or record == self.record():
            return None
        before = Version(str(record.get("version")), record.get("commit"), record.get("dirty"))
        return f"graphfold: {before.short} -> {self.short}"


def _git(folder: Path, *command: str) -> str | None:
    """What git prints in a folder, None where it fails or there is none."""
    unset = (word for name in OTHERS for word in ("-u", name))
    # As in a container git may find that the checkout is another user's; its code runs already.
    ours = f"safe.directory={folder.resolve().parent}"
    line = ("env", *unset, *GIT, "-c", ours, "-C", str(folder), *command)
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
