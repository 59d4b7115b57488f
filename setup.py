"""What lies elsewhere in a wheel than here: conf/ and docs/, which go into the package, and the git
commit that it is built from.

All else is in pyproject.toml.
"""

import json
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # builds run without it

from app.version import RECORD, Version


class BuildWithCommit(build_py):
    """Copies the packages, and records the commit in `app`."""

    def run(self) -> None:
        """Build. An editable installation asks git itself."""
        super().run()
        found = Version.of()
        if found.commit is not None and not self.editable_mode:
            record = json.dumps(found.record())
            (Path(self.build_lib) / "app" / RECORD).write_text(record, encoding="utf-8")


setup(
    cmdclass={"build_py": BuildWithCommit},
    packages=[
        *find_packages(include=["app", "app.*", "graphfold", "graphfold.*"]),
        "app.conf",
        "app.docs",
        "hydra_plugins",
    ],
    # <prefix>/share/graphfold: jobs of SLURM for those who have no checkout
    data_files=[("share/graphfold", ["scripts/train.sbatch", "scripts/sweep.sbatch"])],
    package_dir={"app.conf": "conf", "app.docs": "docs"},
    package_data={
        "app": ["py.typed", "cli/options/*.txt"],
        "app.conf": ["*.yaml", "*/*.yaml"],
        "app.docs": ["*.md", "*.svg", "*/*.svg"],
        "graphfold": ["py.typed"],
    },
)
