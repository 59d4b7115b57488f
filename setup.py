"""What lies elsewhere in a wheel than here: conf/ and docs/, which go into the package.

All else is in pyproject.toml.
"""

from setuptools import find_packages, setup

setup(
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
