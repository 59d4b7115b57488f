"""What lies elsewhere in a wheel than here: conf/, which goes into the package.

All else is in pyproject.toml.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["app", "app.*", "graphfold", "graphfold.*"]),
        "app.conf",
        "hydra_plugins",
    ],
    package_dir={"app.conf": "conf"},
    package_data={
        "app": ["py.typed", "cli/options/*.txt"],
        "app.conf": ["*.yaml", "*/*.yaml"],
        "graphfold": ["py.typed"],
    },
)
