"""Build the site of docs/ with Zensical; exits with 1 for a broken link or anchor.

    python scripts/docs_site.py

Needs `pip install graphfold[docs]`; zensical.toml has the navigation. Pages are copied to
build/docs: links that leave them become plain text, as the site has no other files.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS, COPY = ROOT / "docs", ROOT / "build" / "docs"
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md")  # pages of the site from the repository's root
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_site(text: str, folder: Path) -> str:
    """Return a page of `folder` with its links as the site has them: all pages in one folder."""

    def link(found: re.Match[str]) -> str:
        title, path, anchor = found[1], found[2], found[3] or ""
        target = (folder / path).resolve()
        if target.is_relative_to(DOCS) or not target.exists():
            inside = target.relative_to(DOCS) if target.is_relative_to(DOCS) else path
            return f"[{title}]({inside}{anchor})"
        name = str(target.relative_to(ROOT))
        return f"[{title}]({name}{anchor})" if name in BESIDE else title

    return LINK.sub(link, text)


def copy_pages() -> None:
    """Copy the pages and pictures of the site to build/docs."""
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(DOCS, COPY)
    for page in (*DOCS.glob("*.md"), *(ROOT / name for name in BESIDE)):
        (COPY / page.name).write_text(on_site(page.read_text(), page.parent))


def main() -> int:
    """Build the site into site/; returns the exit code."""
    copy_pages()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
