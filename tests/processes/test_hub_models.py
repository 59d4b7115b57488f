"""Models by their names on the hub: brought from a server here, found in the cache, or refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from app.errors import ConfigError
from app.hf.hub import config_folder, model_folder
from tests.hf_folders import KEY, loaded, save_random
from tests.test_config import load

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

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        file = self.server.folder / self.path.rpartition("/")[2]
        if self.server.fault is not None:
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
