"""Models by their names on the hub: brought from a server here, found in the cache, or refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from app.cli import convert
from app.cli.options.compose import load_overrides, register_schema
from app.cli.processes.launcher import Launch
from app.cli.start.launch import runnable
from app.config import ParallelConfig, Run
from app.data.tokenizer import bytes_as_json
from app.data.tokenizer_files import bring_tokenizer
from app.engine.ranks.groups import create_groups
from app.engine.start.start import check_tokenizer, open_pretrained
from app.errors import ConfigError, OwnError
from app.hf.hub import commit_of, config_folder, model_folder, texts_folder
from app.hf.their_model import TheirModel
from app.plan.model.stage import model_weights
from app.plan.sharding.reshard import Block
from app.planner.plan import Plan
from tests.config import load
from tests.distributed import run_distributed
from tests.hf_folders import (
    KEY,
    edit_config,
    loaded,
    pickle,
    save_random,
    split_into_two,
    split_pickle,
)
from tests.programs import run_forked
from tests.runs import make_run
from tests.training import ROOT, corpus_in

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "somebody/some-model"


class Hub(ThreadingHTTPServer):
    """The two kinds of questions that the library asks of a hub, for one model."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.folder = folder
        self.asked: list[str] = []
        self.fault: tuple[int, str] | None = None  # status and code of every answer
        self.hangs_up = False  # instead of answering

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if self.path.startswith(("/api/models/", "/somebody/")):  # not what the library asks once
            self.server.asked.append(self.path)
        file = self.server.folder / self.path.rpartition("/")[2]
        if self.server.hangs_up:
            self.close_connection = True
        elif self.server.fault is not None:
            status, code = self.server.fault
            self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"})
        elif self.path.startswith(f"/api/models/{NAME}/tree"):
            files = [
                {"type": "file", "path": each.name, "size": each.stat().st_size, "oid": each.name}
                for each in self.server.folder.iterdir()
            ]
            self._answer(200, json.dumps(files).encode(), {})
        elif self.path.startswith(f"/api/models/{NAME}"):
            names = [{"rfilename": each.name} for each in self.server.folder.iterdir()]
            told = {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": names}
            self._answer(200, json.dumps(told).encode(), {})
        elif self.path.startswith(f"/{NAME}/resolve/") and file.is_file():
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{file.name}-1"'}
            self._answer(200, file.read_bytes(), headers)
        else:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "none"})

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "theirs").mkdir()
    server = Hub(tmp_path / "theirs")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def refused(name: str = NAME) -> str:
    with pytest.raises(ConfigError) as error:
        model_folder(name, KEY)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_comes_from_the_hub_once_and_then_from_the_cache(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    save_random("qwen3", hub.folder)
    (hub.folder / "modeling_evil.py").write_text("boom()")
    (hub.folder / "pytorch_model.bin").write_bytes(b"pickle")
    # the architecture takes one small file
    run = load("model=pretrained", f"model.init_from={NAME}")
    assert (run.model.num_layers, run.model.qk_norm) == (3, True)
    assert not any("safetensors" in path for path in hub.asked)
    folder = model_folder(NAME, KEY)
    brought = {path.name for path in folder.iterdir()}
    assert brought == {"config.json", "generation_config.json", "model.safetensors"}
    assert_same_weights(folder, hub.folder)
    # without network, by the name
    hub.shutdown()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert model_folder(NAME, KEY) == folder and config_folder(NAME, KEY) == folder


@pytest.mark.parametrize("both", [True, False])
def test_weights_come_in_one_format(hub: Hub, both: bool):
    """A single file wins over an index; with an index only the files named there are read."""
    save_random("qwen3", hub.folder)
    one = (hub.folder / "model.safetensors").read_bytes()
    split_into_two(hub.folder)
    (hub.folder / "consolidated.safetensors").write_bytes(one)
    if both:
        (hub.folder / "model.safetensors").write_bytes(one)
    folder = model_folder(NAME, KEY)
    brought = {path.name for path in folder.glob("*.safetensors")}
    parts = {f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)}
    assert brought == ({"model.safetensors"} if both else parts)
    assert_same_weights(folder, hub.folder)
    hub.shutdown()
    assert model_folder(NAME, KEY, commit_of(folder), asks=False) == folder


@pytest.mark.parametrize("several", [True, False])
def test_pickles_come_where_there_are_no_safetensors(
    hub: Hub, several: bool, monkeypatch: pytest.MonkeyPatch
):
    save_random("qwen3", hub.folder)
    before = loaded(hub.folder).state_dict()
    (split_pickle if several else pickle)(hub.folder)
    (hub.folder / "training_args.bin").write_bytes(b"not asked for")
    folder = model_folder(NAME, KEY)
    brought = {path.name for path in folder.glob("*.bin")}
    parts = {f"pytorch_model-{number:05d}-of-00002.bin" for number in (1, 2)}
    assert brought == (parts if several else {"pytorch_model.bin"})
    after = loaded(folder).state_dict()
    assert all(after[name].equal(value) for name, value in before.items())
    assert model_folder(NAME, KEY, commit_of(folder), asks=False) == folder
    # without network, by the name
    hub.shutdown()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert model_folder(NAME, KEY) == folder


def test_weights_missing_in_cache_are_downloaded(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    save_random("qwen3", hub.folder)
    texts = texts_folder(NAME, KEY)
    assert {path.name for path in texts.iterdir()} == {"config.json", "generation_config.json"}
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "is not in the cache either, and http://127.0.0.1:9 cannot be reached" in refused()


def test_export_downloads_texts_only(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """For a run folder without them; a model changed on the hub since then is refused."""
    save_random("qwen3", hub.folder)
    (hub.folder / "tokenizer.json").write_text("{}")
    run = tmp_path / "run"
    assert convert.main(["from-hf", NAME, str(run)]) == 0
    for folder in (run / "pretrained", tmp_path / "cache"):
        shutil.rmtree(folder)
    hub.asked.clear()
    assert convert.main(["to-hf", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert hub.asked and not any("safetensors" in path for path in hub.asked)
    edit_config(hub.folder, rms_norm_eps=0.5)
    shutil.rmtree(tmp_path / "cache")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        convert.main(["to-hf", str(run), str(tmp_path / "other")])
    said = capsys.readouterr().err
    rule = "config.json has model.norm_eps=0.5, and the checkpoint 1e-05"
    assert said.startswith("convert: to-hf=") and said.endswith(f"{COMMIT}: {rule}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out", "run", "theirs"]


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = loaded(one).state_dict(), loaded(other).state_dict()
    assert all(theirs[name].equal(value) for name, value in mine.items())


def test_a_model_that_is_not_there_is_one_line(hub: Hub):
    hub.fault = (404, "RepoNotFound")
    expected = f"no such folder, and no such model on {hub.url}, or none that you may read"
    assert refused() == f"{KEY}={NAME}: {expected}"


def test_a_gated_model_is_one_line(hub: Hub):
    hub.fault = (403, "GatedRepo")
    assert refused() == (
        f"{KEY}={NAME}: is gated on {hub.url}: accept its terms there, then log in (hf auth login)"
    )


def test_a_hub_that_hangs_up_is_one_line(hub: Hub, tmp_path: Path):
    run = run_by_name(hub)
    hub.hangs_up = True
    line = refused()
    assert line.startswith(f"{KEY}={NAME}: cannot be downloaded from {hub.url}: ")
    caches = [tmp_path / "one", tmp_path / "two"]
    assert run_distributed(first_weight, 4, run, caches) == [line] * 4


def test_a_repository_without_a_model_is_one_line(hub: Hub):
    (hub.folder / "README.md").write_text("no model")
    with pytest.raises(ConfigError, match=f"{KEY}={NAME}: is no model on {hub.url}") as error:
        config_folder(NAME, KEY)
    assert "\n" not in str(error.value)


def test_without_network_and_cache_it_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert refused() == (
        f"{KEY}={NAME}: no such folder; is not in the cache either, and http://127.0.0.1:9 cannot "
        "be reached"
    )


def test_what_is_no_name_is_no_folder(tmp_path: Path):
    (tmp_path / "llama-3").mkdir()
    expected = f"no such folder; did you mean {tmp_path}/llama-3?"
    assert refused(f"{tmp_path}/lama-3") == f"{KEY}={tmp_path}/lama-3: {expected}"


@pytest.mark.parametrize("other", ["llama-3-70b", "llama-2-8b", "llama-3-8b-instruct", "llama-3"])
def test_no_hint_names_another_size(other: str, tmp_path: Path):
    """Nor another version or kind of a model."""
    (tmp_path / "llama-3-8b").mkdir()
    assert refused(f"{tmp_path}/{other}") == f"{KEY}={tmp_path}/{other}: no such folder"


def first_weight(rank: int, run: Run, caches: list[Path]) -> float | str:
    """Return a weight of the initial model of ranks on two hosts.

    Each host has two ranks and a cache.
    """
    constants.HF_HUB_CACHE = str(caches[rank // 2])
    groups = create_groups(Plan(run).layout, rank)
    try:
        pretrained = open_pretrained(run, groups, local_rank=rank % 2)
    except ConfigError as error:
        return str(error)
    named = next(model_weights(pretrained.model))
    part = torch.empty(1)
    pretrained.fill_part(named, Block.whole(*named.weight.shape), (0, 1), tensor=part)
    return part.item()


def run_by_name(hub: Hub) -> Run:
    save_random("llama", hub.folder)
    model = dataclasses.replace(TheirModel.read(hub.folder, KEY).model, init_from=NAME)
    return make_run(model, parallel=ParallelConfig(dp=4))


@pytest.mark.full
def test_one_process_of_each_host_asks_the_hub(hub: Hub, tmp_path: Path):
    run = run_by_name(hub)
    model_folder(NAME, KEY)
    alone = len(hub.asked)
    hub.asked.clear()
    caches = [tmp_path / "one", tmp_path / "two"]
    found = run_distributed(first_weight, 4, run, caches)
    expected = loaded(hub.folder).embedding.weight.flatten()[0].item()
    assert found == [expected] * 4
    assert len(hub.asked) <= 2 * alone
    # the second host asks for the commit that the first has found, not for the newest
    assert hub.asked.count(f"/api/models/{NAME}/revision/main") == 1


def test_hub_error_reaches_every_rank(hub: Hub, tmp_path: Path):
    run = run_by_name(hub)
    hub.fault = (403, "GatedRepo")
    line = refused()
    alone = len(hub.asked)
    hub.asked.clear()
    caches = [tmp_path / "one", tmp_path / "two"]
    assert run_distributed(first_weight, 4, run, caches) == [line] * 4
    assert len(hub.asked) == alone


def test_a_model_that_changes_while_ranks_start_is_refused(hub: Hub, tmp_path: Path):
    run = run_by_name(hub)
    edit_config(hub.folder, rms_norm_eps=0.5)
    (line, *others) = run_distributed(first_weight, 4, run, [tmp_path / "one", tmp_path / "two"])
    assert line == (
        f"{KEY}={NAME}: has model.norm_eps=0.5 now, and had 1e-05 when the run began; start it "
        "again"
    )
    assert others == [line] * 3


def test_other_processes_of_a_host_wait_for_the_first(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    save_random("llama", hub.folder)
    found: list[Path] = []
    waiting = threading.Thread(target=lambda: found.append(config_folder(NAME, KEY, asks=False)))
    waiting.start()
    time.sleep(0.1)
    assert hub.asked == []
    folder = config_folder(NAME, KEY)
    waiting.join(10)
    assert found == [folder]
    monkeypatch.setattr("app.data.hub_files.WAIT_S", 0.0)
    with pytest.raises(ConfigError) as late:
        config_folder("somebody/another", KEY, asks=False)
    expected = "the first process of this host did not download config.json in 0 s"
    assert str(late.value) == f"{KEY}=somebody/another: {expected}"


@pytest.mark.full
def test_first_process_of_each_host_reports_hub_error(hub: Hub):
    hub.fault = (403, "GatedRepo")
    register_schema()
    GlobalHydra.instance().clear()
    kinds = []
    for rank in (0, 2):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose("train", ["model=pretrained", f"model.init_from={NAME}"])
        with pytest.raises(ConfigError, match="is gated on") as refusal:
            runnable(config, Launch(rank, local_rank=0, world_size=4))
        kinds.append(type(refusal.value))
    assert kinds == [ConfigError, OwnError]


def asked_by_a_run(hub: Hub, folder: Path, patch: pytest.MonkeyPatch, *, ranks: int) -> list[str]:
    """Return a run's requests to the hub on this many ranks; its launcher makes none."""
    hub.asked.clear()
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / f"cache{ranks}"))
    words = [
        *(word for word in corpus_in(folder / "corpus") if not word.startswith("model")),
        *("model=pretrained", f"model.init_from={NAME}", "train.steps=1", "checkpoint=none"),
        *(f"run_dir={folder}/run{ranks}", f"parallel.dp={ranks}"),
    ]
    torchrun = ["-m", "app.cli.torchrun", "--standalone", f"--nproc-per-node={ranks}"]
    line = [sys.executable, *torchrun, str(ROOT / "train.py"), *words]
    ended = run_forked(folder, line, tree=True)
    assert ended.returncode == 0, ended.stderr
    return sorted(hub.asked)


@pytest.mark.full
def test_a_run_asks_the_hub_as_often_on_several_ranks_as_on_one(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_random("llama", hub.folder, vocab_size=264)
    alone = asked_by_a_run(hub, tmp_path, monkeypatch, ranks=1)
    assert alone and asked_by_a_run(hub, tmp_path, monkeypatch, ranks=2) == alone


def test_tokenizer_by_its_name_on_the_hub(hub: Hub):
    (hub.folder / "tokenizer.json").write_text(bytes_as_json())
    (hub.folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (hub.folder / "model.safetensors").write_bytes(b"large")
    words = [f"data.tokenizer={NAME}"]
    assert load_overrides(words).model.vocab_size == 264
    assert not [each for each in hub.asked if "safetensors" in each]
    tokenizer = check_tokenizer(load_overrides(words))
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    constants.HF_HUB_OFFLINE, asked = True, len(hub.asked)  # from the cache
    assert check_tokenizer(load_overrides(words)).eod == 256 and len(hub.asked) == asked


def test_tokenizer_that_the_hub_lacks(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    (hub.folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"data\.tokenizer=.*EntryNotFound|is no model on"):
        load_overrides([f"data.tokenizer={NAME}"])
    hub.hangs_up = True
    with pytest.raises(ConfigError, match=r"data\.tokenizer=somebody/other: "):
        load_overrides(["data.tokenizer=somebody/other"])
    monkeypatch.setattr("app.data.hub_files.WAIT_S", 0.0)
    with pytest.raises(ConfigError, match="the first process of this host did not download"):
        bring_tokenizer("somebody/other", asks=False)
