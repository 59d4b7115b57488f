"""graphfold-doctor: findings from faked readings of hosts, and real pairs of ranks over gloo."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

import pytest

from app.cli.doctor import DoctorRequest, main
from app.cli.host_checks import nodes
from app.cli.host_checks.collectives import HostLinks, expected_gb_s, judge_speed
from app.cli.host_checks.finding import CheckResult, CheckState, as_text, exit_code, fail, ok, warn
from app.cli.host_checks.host import (
    Host,
    Storage,
    host_identity,
    judge_host,
    judge_storage,
    read_storage,
)
from app.cli.host_checks.network import Network, judge_network, judge_variables, read_network
from app.cli.host_checks.nodes import Unreachable, meeting
from app.cli.host_checks.nvidia import Gpus, judge_gpus, read_gpus
from app.cli.processes.launcher import Launch
from app.errors import ConfigError
from tests.cases import each
from tests.ports import free_port
from tests.programs import Forked

LINE = "NVIDIA H100 80GB HBM3, 580.95.05, 4, 345, Enabled, 0, 5, 16, 16, Default, Disabled"
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-51\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t0-51\t0\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
)
LINKS = "".join(
    f"GPU {gpu}: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\n"
    + "".join(f"\t Link {link}: 26.562 GB/s\n" for link in range(18))
    for gpu in range(2)
)


class Smi:
    """nvidia-smi of a node of two H100s, with some answers replaced."""

    def __init__(self, gpu: str = LINE, **answers: tuple[int, str]) -> None:
        self.answers = {
            "--query-gpu=name": (0, f"{LINE}\n{gpu}\n"),
            "--query-gpu=clocks_event": (0, "0x0000000000000001\n0x0000000000000004\n"),
            "--query-remapped": (0, "0\n0\n"),
            "topo": (0, TOPOLOGY),
            "nvlink": (0, LINKS),
        }
        for name, answer in answers.items():
            (key,) = [key for key in self.answers if name in key.replace("-", "_")]
            self.answers[key] = answer

    def __call__(self, arguments: Sequence[str]) -> tuple[int, str]:
        for start, answer in self.answers.items():
            if arguments[0].startswith(start):
                return answer
        return 2, 'Field "x" is not a valid field to query.'


def states(found: Sequence[CheckResult]) -> dict[str, CheckState]:
    """The findings that are no ok."""
    return {each.check: each.state for each in found if each.state is not CheckState.ok}


def test_a_healthy_node_of_gpus_has_nothing_to_do():
    read = read_gpus(Smi())
    assert read is not None and read.paths == ("NV18",) and len(read.gpus) == 2
    assert read.nvlink_gb_s == pytest.approx((478.1, 478.1), abs=0.1)
    found = judge_gpus(read, "13.0")
    assert states(found) == {} and {each.check for each in found} >= {"driver", "ECC", "GPU links"}
    assert found[0].measured == "2 x NVIDIA H100 80GB HBM3"


@each(
    [
        ("name", (9, "couldn't communicate with the NVIDIA driver."), "GPUs", "fail"),
        ("clocks_event", (0, "0x0\n0x0000000000000040\n"), "GPU clocks", "warn"),
        ("clocks_event", (2, "no such field"), "GPU clocks", "skip"),
        ("remapped", (0, "0\nYes\n"), "ECC", "fail"),
        ("topo", (0, TOPOLOGY.replace("NV18", "SYS")), "GPU links", "warn"),
        ("topo", (1, ""), "GPU links", "skip"),
        ("nvlink", (0, LINKS.replace("26.562 GB/s", "<inactive>", 1)), "GPU links", "warn"),
    ]
)
def test_trouble_that_nvidia_smi_reports(
    asked: str, answer: tuple[int, str], check: str, state: str
):
    found = judge_gpus(read_gpus(Smi(**{asked: answer})), "13.0")
    assert states(found) == {check: CheckState(state)}


@each(
    [
        ("580.95.05", "570.1", "", {}),  # the first GPU's driver counts
        (", Enabled, 0,", ", Enabled, 3,", "ECC", "fail"),
        (", Enabled, 0,", ", Disabled, [N/A],", "ECC", "warn"),
        (", 16, 16,", ", 8, 16,", "PCIe", "warn"),
        ("5, 16, 16", "5, [N/A], [N/A]", "PCIe", "skip"),
        ("Default", "Prohibited", "GPU use", "fail"),
        ("05, 4,", "05, 9000,", "GPU use", "warn"),
        ("Default, Disabled", "Default, Enabled", "GPU use", "warn"),
        ("H100 80GB HBM3", "A100", "GPUs", "warn"),
    ]
)
def test_trouble_of_one_gpu(old: str, new: str, check: str, state: str):
    found = judge_gpus(read_gpus(Smi(LINE.replace(old, new))), "13.0")
    assert states(found) == ({check: CheckState(state)} if check else {})


@each(
    [
        ("13.0", "580.65.06", "ok"),
        ("13.0", "575.51.03", "fail"),
        ("12.8", "525.60.13", "ok"),
        ("12.8", "515.1", "fail"),
        ("99.0", "580.65.06", "skip"),
        (None, "580.65.06", "fail"),
    ]
)
def test_driver_against_cuda_of_torch(cuda: str | None, driver: str, state: str):
    gpu = LINE.replace("580.95.05", driver)
    read = read_gpus(Smi(gpu, name=(0, f"{gpu}\n{gpu}\n")))
    found = {each.check: each.state for each in judge_gpus(read, cuda)}
    assert found["driver"] is CheckState(state)


def test_no_gpu_and_no_driver():
    assert states(judge_gpus(None, None)) == {"GPUs": CheckState.skip}
    assert states(judge_gpus(None, "13.0")) == {"GPUs": CheckState.fail}
    assert states(judge_gpus(Gpus(), "13.0")) == {"GPUs": CheckState.fail}


HOST = Host(
    cores=64,
    load=1.0,
    all_cores=64,
    memory_gib=1000.0,
    shm_gib=500.0,
    memlock_gib=None,
    open_files=2**16,
    governor="performance",
    python="3.12.1",
    torch="2.13.0+cu130",
)


@each(
    [
        ({}, {}),
        ({"cores": 16}, {"cores": "warn"}),
        ({"load": 200.0}, {"cores": "warn"}),
        ({"memory_gib": 100.0}, {"memory": "warn"}),
        ({"shm_gib": 0.0625}, {"/dev/shm": "warn"}),
        ({"shm_gib": None}, {"/dev/shm": "fail"}),
        ({"memlock_gib": 0.01}, {"limits": "fail"}),
        ({"open_files": 1024}, {"limits": "warn"}),
        ({"governor": "powersave"}, {"CPU clocks": "warn"}),
        ({"governor": None}, {}),
        ({"torch": "2.10.1"}, {"libraries": "fail"}),
    ]
)
def test_trouble_of_a_host(change: dict[str, object], found: dict[str, str]):
    judged = judge_host(replace(HOST, **change), gpus=8, rdma=True)
    assert states(judged) == {check: CheckState(state) for check, state in found.items()}


def test_limits_do_not_matter_without_rdma():
    assert states(judge_host(replace(HOST, memlock_gib=0.01), 8, rdma=False)) == {}


@each(
    [
        (Storage(Path("/x"), 900, write_mb_s=2000, locks=True), {}),
        (Storage(Path("/x"), 3, write_mb_s=2000, locks=True), {"storage": "warn"}),
        (Storage(Path("/x"), 900, write_mb_s=20, locks=True), {"storage": "warn"}),
        (Storage(Path("/x"), 900, write_mb_s=2000, locks=False), {"locks": "warn"}),
        (Storage(Path("/x"), 900, error="Read-only file system"), {"storage": "fail"}),
    ]
)
def test_trouble_of_storage(read: Storage, found: dict[str, str]):
    assert states(judge_storage(read)) == {name: CheckState(state) for name, state in found.items()}


def test_storage_is_measured_and_left_as_it_was(tmp_path: Path):
    read = read_storage(tmp_path / "not/yet/there")
    assert read.folder == tmp_path and read.error is None and read.locks is True
    assert read.write_mb_s is not None and read.write_mb_s > 1 and not list(tmp_path.iterdir())
    (found,) = judge_storage(replace(read, write_mb_s=2000.0, free_gib=900.0))
    told = (
        f"{tmp_path}/not/yet/there will be made below {tmp_path}: 900 GiB free, 2000 MB/s written"
    )
    assert found.measured == told
    assert read_storage(Path("/proc/self/run")).error is not None


def test_a_run_folder_below_a_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("link").symlink_to("nowhere")
    for run_dir in ("file", "file/x", "link/x"):
        (found,) = judge_storage(read_storage(Path(run_dir)))
        wanted = "link is a link to nothing; " if "link" in run_dir else "file is a file; "
        assert found.state is CheckState.fail and found.measured.startswith(wanted)


CARDS = Network({"lo": None, "eth0": 25.0, "ib0": 400.0}, {"mlx5_0:1": 400.0}, (), True)


@each(
    [
        ({}, {}),
        ({"NCCL_SOCKET_IFNAME": "eth"}, {}),  # the beginning of a name
        ({"NCCL_SOCKET_IFNAME": "=eth"}, {"variables": "fail"}),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, {}),
        ({"GLOO_SOCKET_IFNAME": "eth"}, {"variables": "fail"}),  # gloo wants the full name
        ({"GLOO_SOCKET_IFNAME": "ib0"}, {}),
        ({"NCCL_IB_HCA": "mlx5"}, {}),
        ({"NCCL_IB_HCA": "=mlx5_0:1"}, {}),
        ({"NCCL_IB_HCA": "mlx4_0"}, {"variables": "fail"}),
        ({"NCCL_IB_DISABLE": "1"}, {"variables": "warn"}),
        ({"NCCL_P2P_DISABLE": "1"}, {"variables": "warn"}),
        ({"NCCL_NVLS_ENABLE": "0"}, {"variables": "warn"}),
        ({"NCCL_ALGO": "Ring"}, {"variables": "warn"}),
        ({"NCCL_DEBUG": "INFO"}, {"variables": "warn"}),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {"variables": "warn"}),
    ]
)
def test_variables_that_contradict_the_host(env: dict[str, str], found: dict[str, str]):
    wanted = {check: CheckState(state) for check, state in found.items()}
    assert states(judge_network(CARDS, env, gpus=8)) == wanted


def test_switches_of_gpus_do_not_matter_without_them():
    assert states(judge_variables(Network({}, {}), {"NCCL_P2P_DISABLE": "1"}, gpus=0)) == {}


def test_network_is_read_from_sys(tmp_path: Path):
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for name, state, speed in (("eth0", "up", "25000"), ("eth1", "down", "10"), ("vf", "up", "-1")):
        write(f"class/net/{name}/operstate", f"{state}\n")
        write(f"class/net/{name}/speed", f"{speed}\n")
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        write(f"class/infiniband/{card}/ports/1/state", f"{state}\n")
        write(f"class/infiniband/{card}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    read = read_network(tmp_path)
    assert read == Network({"eth0": 25.0, "vf": None}, {"mlx5_0:1": 400.0}, ("mlx5_1:1",), False)
    found = states(judge_network(read, {}, gpus=8))
    assert found == {"network": CheckState.warn, "GPUDirect": CheckState.warn}


def test_expected_bandwidth_follows_the_slowest_link():
    node = HostLinks(gpus=True, gpu_gb_s=478.0, card_gb_s=50.0, cards=8)
    assert expected_gb_s(node, 1, 8) == 478.0
    assert expected_gb_s(node, 2, 1) == 50.0
    assert expected_gb_s(node, 2, 8) == 400.0
    assert expected_gb_s(replace(node, gpu_gb_s=31.5), 2, 8) == 31.5
    assert expected_gb_s(replace(node, card_gb_s=None), 2, 8) is None
    assert expected_gb_s(replace(node, gpus=False), 2, 1) == 1.0
    assert expected_gb_s(replace(node, gpus=False, card_gb_s=0.125), 2, 1) == 0.125


@each([(45.0, "ok"), (20.0, "warn"), (5.0, "fail")])
def test_measured_bandwidth_against_the_expected(gb_s: float, state: str):
    latency, bandwidth = judge_speed("nccl", 30.0, gb_s, expected=50.0, hosts=2)
    assert latency.state is CheckState.ok and bandwidth.state is CheckState(state)
    assert judge_speed("nccl", 5000.0, gb_s, expected=None, hosts=2)[0].state is CheckState.warn


def test_report_merges_equal_lines_and_counts_failures():
    found = [replace(ok("cores", "64"), host=name) for name in ("n1", "n2")]
    found += [replace(fail("ports", "closed", "open them"), host="n2"), warn("x", "y", "z")]
    assert as_text(found, 2, 3.2) == (
        "ok    cores  n1, n2: 64\nfail  ports  n2: closed\n             -> open them\n"
        "warn  x      y\n             -> z\n2 hosts, 3 s: 2 ok, 1 warn, 1 fail"
    )
    assert exit_code(found) == 1 and exit_code(found[:2]) == 0
    assert [CheckResult.from_json(each.as_json()) for each in found] == found


def test_unknown_option_names_the_nearest():
    assert DoctorRequest.parse(["run_dir=/a", "--json"]) == DoctorRequest(Path("/a"), json=True)
    with pytest.raises(ConfigError, match="did you mean run_dir=/a"):
        DoctorRequest.parse(["rundir=/a"])
    with pytest.raises(
        ConfigError, match=r"^run_dir=: must name a folder; for example run_dir=runs$"
    ):
        DoctorRequest.parse(["run_dir="])
    with pytest.raises(ConfigError, match=r"did you mean --json\?$"):
        DoctorRequest.parse(["--json=1"])


def test_this_host_alone_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = main([f"run_dir={tmp_path}", "--json"], os.getppid())
    told = json.loads(capsys.readouterr().out)
    names = {each["check"] for each in told["checks"]}
    assert names >= {"GPUs", "cores", "memory", "limits", "network", "variables", "storage"}
    assert told["hosts"] == 1 and code == told["exit_code"] and told["seconds"] < 60


def pair(folders: Sequence[Path], **env: str) -> list[tuple[int, str]]:
    """Exit code and output of two ranks that SLURM would have started on two nodes."""
    settings = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(free_port()), **env}
    settings |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}

    base = {key: text for key, text in os.environ.items() if "SOCKET_IFNAME" not in key}
    line = [sys.executable, "-m", "app.cli.doctor", "run_dir=runs", "--json"]
    with ExitStack() as stack:
        ranks = []
        for number, folder in enumerate(folders):
            output = stack.enter_context(TemporaryFile("w+", encoding="utf-8"))
            named = {"RANK": str(number), "SLURMD_NODENAME": f"n{number + 1}"}
            mine = {**base, **named, **settings}
            program = Forked(line, cwd=folder, env=mine, stdout=output, stderr=output)
            ranks.append((program, output))
        return [(program.wait(100), _read(output)) for program, output in ranks]


def _read(output: TextIO) -> str:
    output.seek(0)
    return output.read()


def test_a_pair_of_ranks_over_gloo(tmp_path: Path):
    first, second = pair([tmp_path, tmp_path], GLOO_SOCKET_IFNAME="lo")
    assert second[1] == "" and first[0] == second[0], (first, second)
    told = json.loads(first[1])
    states = {f"{each['check']} {each['host']}": each["state"] for each in told["checks"]}
    assert told["hosts"] == 2 and told["exit_code"] == first[0] == 0, told
    for check in ("ports n1", "ports n2", "clocks n1", "shared folder n2", "same software "):
        assert states[check] == "ok", told
    (bandwidth,) = [each for each in told["checks"] if each["check"] == "bandwidth"]
    assert "GB/s" in bandwidth["measured"] and "latency " in states
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_pair_with_folders_of_their_own_fails(tmp_path: Path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    first, second = pair(folders, GLOO_SOCKET_IFNAME="lo")
    assert first[0] == second[0] == 1 and second[1] == ""
    (failed,) = [each for each in json.loads(first[1])["checks"] if each["state"] == "fail"]
    assert failed["check"] == "shared folder" and failed["host"] == "n2"


@pytest.mark.full
def test_two_launchers_on_one_host_are_one_host(tmp_path: Path):
    first, second = pair([tmp_path, tmp_path], SLURMD_NODENAME="localhost")
    told = json.loads(first[1])
    assert told["hosts"] == 1 and first[0] == second[0] == 0, told
    skipped = {each["check"] for each in told["checks"] if "on one host" in each["measured"]}
    assert skipped == {"ports", "clocks", "shared folder"}
    assert not any(each["check"].startswith("same") for each in told["checks"])


def test_hosts_of_one_name_are_told_apart(tmp_path: Path):
    """Containers are often called localhost; several launchers may be on one host."""
    boots = []
    for number, (boot, net) in enumerate([("a", "net:[1]"), ("a", "net:[2]"), ("b", "net:[1]")]):
        root = tmp_path / str(number)
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/self/ns").mkdir(parents=True)
        (root / "proc/sys/kernel/random/boot_id").write_text(f"{boot}\n")
        (root / "proc/self/ns/net").symlink_to(net)
        boots.append(host_identity("localhost", root))
    assert len(set(boots)) == 3 and host_identity("localhost", tmp_path) == "localhost "
    assert host_identity("localhost") == host_identity("localhost") != host_identity("other")

    finding = ok("cores", "2").as_json()
    said = {"host": "localhost", "leads": True, "findings": [finding], "shared": "/x", "facts": {}}
    launchers = [{**said, "rank": n, "identity": boots[n // 2]} for n in range(4)]
    named = nodes._with_names(launchers)
    names = ["localhost of rank 0"] * 2 + ["localhost of rank 2"] * 2
    assert [one["host"] for one in named] == names
    assert [one["findings"][0]["host"] for one in named] == names
    assert nodes._left_out(nodes._first_of_hosts(named)) == []
    (found,) = nodes._same(nodes._first_of_hosts(named))
    assert found.measured == "on 2 hosts"

    alone = nodes._first_of_hosts(nodes._with_names(launchers[:2]))
    assert [one["host"] for one in alone] == ["localhost"] and nodes._same(alone) == []
    left = nodes._left_out(alone)
    assert [each.check for each in left] == ["ports", "clocks", "shared folder"]
    assert {each.measured for each in left} == {"not checked: all ranks are on one host"}
    (unwritten,) = nodes._left_out([{**one, "shared": None} for one in named])
    assert unwritten.measured == "not checked: localhost of rank 0 writes none (storage)"


def test_nobody_at_the_rendezvous_is_said_in_time():
    launch = Launch(1, 0, 2, master=("127.0.0.1", free_port()))
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:\d+ does not answer within 0 s: .*refus"):
        meeting(launch, seconds=0.1)
