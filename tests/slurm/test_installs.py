"""train.sbatch without a checkout: a pip install, and the files of a container image."""

from __future__ import annotations

import dataclasses
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.integration.installed import build_wheel, install
from tests.slurm.conftest import Cluster
from tests.training import LONG, losses

pytestmark = pytest.mark.slurm
# Stands for Apptainer, as far as train.sbatch uses it, with an image that is a folder: mounts what
# it is told to and what every container has, and runs the command with the image as its root.
APPTAINER = """#!/bin/bash
set -euo pipefail
[ "$1" = exec ] && shift
binds=(/proc /dev /sys /tmp) place=/
while [ "${1#--}" != "$1" ]; do
  case "$1" in --bind) binds+=("$2"); shift 2 ;; --pwd) place=$2; shift 2 ;; --nv) shift ;; *) exit 9 ;; esac
done
image=$1; shift
export image place
exec unshare --mount bash -c '
  set -euo pipefail
  while [ "$1" != -- ]; do mkdir -p "$image$1"; mount --rbind "$1" "$image$1"; shift; done; shift
  exec chroot "$image" /bin/bash -c "cd \\"\\$0\\" && exec \\"\\$@\\"" "$place" "$@"
' image "${binds[@]}" -- "$@"
"""
HOST = ("usr", "lib", "lib64", "bin", "sbin", "etc")  # what an image takes from a distribution


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def without_a_checkout(cluster: Cluster, folder: Path, **more: str) -> Cluster:
    """The same cluster from another folder, with nothing of this one on Python's path."""
    folder.mkdir()
    env = {key: value for key, value in cluster.env.items() if key != "PYTHONPATH"}
    return dataclasses.replace(cluster, env={**env, **more}, folder=folder)


def trained(user: Cluster, script: Path, *overrides: str) -> dict[int, float]:
    """The losses of a job of two nodes; its log names no failure."""
    options = ("--parsable", "--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1")
    job = user.run("sbatch", *options, str(script), *overrides)
    assert user.ended(job) == "COMPLETED", user.log(job)
    return losses(user.folder / f"runs/slurm-{job}")


def test_pip_install_trains_over_two_nodes(
    cluster: Cluster,
    wheel: Path,
    corpus: tuple[str, ...],
    undisturbed: dict[int, float],
    tmp_path: Path,
):
    """The active environment's Python, and the script that came with the package."""
    programs = install(wheel, tmp_path / "environment")
    path = f"{programs}:{cluster.env['PATH']}"
    user = without_a_checkout(cluster, tmp_path / "work", PATH=path)
    found = trained(user, programs.parent / "share/graphfold/train.sbatch", *corpus, *LONG)
    assert found == undisturbed


def test_unpacked_image_trains_over_two_nodes(
    cluster: Cluster,
    wheel: Path,
    corpus: tuple[str, ...],
    undisturbed: dict[int, float],
    tmp_path: Path,
):
    """Whose root holds no checkout, with the package at another path than on the host."""
    image, programs = tmp_path / "image", tmp_path / "programs"
    package = install(wheel, image / "opt/graphfold")
    for name in HOST:
        if (host := Path("/") / name).is_symlink():
            (image / name).symlink_to(host.readlink())
    programs.mkdir()
    (programs / "apptainer").write_text(APPTAINER)
    (programs / "apptainer").chmod(0o755)
    mounted = [f"/{name}" for name in HOST if not (Path("/") / name).is_symlink()]
    mounted += [sys.base_prefix, sysconfig.get_path("purelib"), str(tmp_path.parent)]
    user = without_a_checkout(
        cluster,
        tmp_path / "work",
        PATH=f"{programs}:{cluster.env['PATH']}",
        GRAPHFOLD_CONTAINER=str(image),
        GRAPHFOLD_RUNTIME="apptainer",
        GRAPHFOLD_PYTHON="/opt/graphfold/bin/python",
        GRAPHFOLD_CONTAINER_OPTIONS=" ".join(f"--bind {each}" for each in mounted),
    )
    found = trained(user, package.parent / "share/graphfold/train.sbatch", *corpus, *LONG)
    assert found == undisturbed
