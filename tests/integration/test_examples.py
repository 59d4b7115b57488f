"""examples/: what they launch composes; their fields are those of the published schemas."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.start.hosted import MISTAKE
from app.errors import DIVERGED
from tests.training import ROOT

FILES = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "examples").glob("*.yaml")}
# Packages generated from the CRDs of Trainer and JobSet; models drop fields that they do not know.
CHECK = """
import sys, yaml
from kubeflow_trainer_api import models
kinds = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}
for path in sys.argv[1:]:
    text = yaml.safe_load(open(path))
    kept = kinds[text["kind"]].from_dict(text).to_dict()
    assert kept == text, (path, kept, text)
    text["spec"]["unknown"] = 1
    assert kinds[text["kind"]].from_dict(text).to_dict() != text
    print(text["kind"])
"""
# SkyPilot's own reader, which checks its schema.
SKYPILOT = """
import sys, yaml
from sky.exceptions import InvalidSkyPilotConfigError
from sky.task import Task
text = yaml.safe_load(open(sys.argv[1]))
print(Task.from_yaml_config(dict(text)).num_nodes)
try:
    Task.from_yaml_config({**text, "unknown": 1})
except InvalidSkyPilotConfigError as error:
    print("unknown" in str(error))
"""


def _container(name: str) -> dict[str, Any]:
    spec = FILES[name]["spec"]
    if name == "trainjob":
        return spec["trainer"]
    (job,) = spec["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("name", ["jobset", "trainjob", "skypilot"])
def test_example_launches_a_run_of_sixteen_ranks(name: str):
    if name == "skypilot":
        words = shlex.split(FILES[name]["run"].replace("\\\n", " "))
    else:
        words = [*_container(name)["command"], *_container(name)["args"]]
    place = words.index("app.cli.train")
    assert words[place - 1] == "-m" and words[1:3] == ["-m", "app.cli.torchrun"]
    overrides = [word for word in words[place + 1 :] if not word.startswith("resume=")]
    run = load_typed(Typed.parse(overrides), 16)
    assert run.world_size == 16 and run.run_dir == "/shared/runs/first"


def test_jobset_meets_at_its_first_pod():
    (job,) = FILES["jobset"]["spec"]["replicatedJobs"]
    name = FILES["jobset"]["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-{job['name']}-0-0.{name}:29500" in _container("jobset")["args"]
    spec = job["template"]["spec"]
    assert f"--nnodes={spec['parallelism']}" in _container("jobset")["args"]
    assert spec["parallelism"] == spec["completions"]


def test_jobset_restarts_nothing_that_fails_again():
    """Its rule counts by the reason that a policy of exit codes gives the job."""
    (job,) = FILES["jobset"]["spec"]["replicatedJobs"]
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    codes = {"containerName": "train", "operator": "In", "values": [MISTAKE, DIVERGED]}
    assert rule == {"action": "FailJob", "onExitCodes": codes}
    assert _container("jobset")["name"] == "train"
    (ends,) = FILES["jobset"]["spec"]["failurePolicy"]["rules"]
    assert (ends["action"], ends["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    told = (ROOT / "docs/messages.md").read_text()
    for code in codes["values"]:
        (help_,) = re.findall(rf"^\| {code} \|.*\| (.*) \|$", told, re.MULTILINE)
        assert help_ in ("no", "once corrected"), help_


def test_jobset_lets_the_user_of_the_image_write():
    """Fresh volumes belong to root."""
    (user,) = re.findall(r"useradd .*--uid (\d+)", (ROOT / "Containerfile").read_text())
    (job,) = FILES["jobset"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["spec"]["securityContext"]["fsGroup"] == int(user)
    told = (ROOT / "examples/trainjob.yaml").read_text()
    assert "add the volumes and securityContext of examples/jobset.yaml" in told


def test_skypilot_writes_to_a_file_system():
    """Buckets lack what checkpoints need: appends, and renames that all nodes see."""
    assert FILES["skypilot"]["volumes"] == {"/shared": "shared"}
    assert "file_mounts" not in FILES["skypilot"]


@pytest.mark.index
@pytest.mark.parametrize(
    ("packages", "check", "names", "wanted"),
    [
        (("kubeflow-trainer-api", "pyyaml"), CHECK, ("jobset", "trainjob"), ["JobSet", "TrainJob"]),
        (("skypilot",), SKYPILOT, ("skypilot",), ["2", "True"]),
    ],
    ids=["Kubernetes", "SkyPilot"],
)
def test_examples_follow_the_published_schemas(
    packages: tuple[str, ...],
    check: str,
    names: tuple[str, ...],
    wanted: list[str],
    tmp_path: Path,
):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path)]
    subprocess.run([*pip, *packages], check=True)
    paths = [str(ROOT / f"examples/{name}.yaml") for name in names]
    done = subprocess.run(
        [sys.executable, "-c", check, *paths],
        env={"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == wanted, done.stderr
