"""`pytorch_model.bin` is read by part, without running code of it."""

from __future__ import annotations

import os
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.errors import ConfigError
from app.hf.file_names import PICKLE as BIN
from app.hf.pretrained import Pretrained
from tests.hf_folders import (
    KEY,
    edit_config,
    loaded,
    pickle,
    save_random,
    split_pickle,
    their_logits,
)
from tests.quantised_folders import of_groups, per_row, save_fp8
from tests.tensors.models import draw_tokens, forward

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NORM = "model.norm.weight"


def strange(tensors: dict[str, Any]) -> None:
    """Have views, parameters and a storage of two tensors."""
    weight = tensors[HEAD]
    tensors[HEAD] = torch.stack((weight, weight), dim=2)[..., 1]
    tensors[NORM] = nn.Parameter(tensors[NORM])
    query = "model.layers.0.self_attn.q_proj.weight"
    tensors[query] = tensors[query].t().contiguous().t()
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = torch.cat((tensors[gate], tensors[up])).chunk(2)


SAVED: dict[str, Callable[[Path], object]] = {
    "one file": pickle,
    "an index": split_pickle,
    "protocol 3": lambda folder: pickle(folder, pickle_protocol=3),
    "views": lambda folder: pickle(folder, strange),
}


@pytest.mark.parametrize("case", SAVED)
@torch.no_grad()
def test_pickled_weights_give_the_same_logits(case: str, tmp_path: Path):
    theirs, ours = save_random("llama", tmp_path)
    SAVED[case](tmp_path)
    tokens = draw_tokens(ours, 2, 17)
    found = forward(loaded(tmp_path), tokens).x
    torch.testing.assert_close(found, their_logits(theirs, tokens), atol=1e-4, rtol=1e-4)


def test_tied_weights_may_share_a_storage(tmp_path: Path):
    save_random("llama-tied", tmp_path)
    before = loaded(tmp_path).state_dict()
    pickle(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING]}))
    after = loaded(tmp_path).state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_pickled_fp8_weights_are_dequantised(tmp_path: Path):
    folder = tmp_path / "fp8"
    save_fp8("llama", folder, of_groups("channel"), per_row, "_scale")
    before = loaded(folder).state_dict()
    pickle(folder)
    after = loaded(folder).state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_safetensors_count_before_pickles(tmp_path: Path):
    save_random("llama", tmp_path)
    (tmp_path / BIN).write_bytes(b"not read")
    loaded(tmp_path)


def test_parts_of_pickles_are_copies(tmp_path: Path):
    """Of a part and no more."""
    save_random("llama", tmp_path)
    pickle(tmp_path)
    part = Pretrained(tmp_path, KEY).files.read(EMBEDDING, ((3, 5), (0, 7)))
    assert part.is_contiguous() and part.untyped_storage().nbytes() == 2 * 7 * 4


class Called:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch ran",)


def shorten(folder: Path) -> None:
    path = pickle(folder)
    path.write_bytes(path.read_bytes()[:-100])


def deflate(folder: Path) -> None:
    path = pickle(folder)
    with zipfile.ZipFile(path) as before:
        held = {name: before.read(name) for name in before.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as after:
        for name, data in held.items():
            after.writestr(name, data)


def with_value(value: object) -> Callable[[Path], object]:
    return lambda folder: pickle(folder, lambda tensors: tensors.update({NORM: value}))


def missing_part(folder: Path) -> None:
    split_pickle(folder)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()


def a_list(folder: Path) -> None:
    torch.save([torch.ones(2)], pickle(folder))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (shorten, f"{BIN} is truncated or no file of torch.save: File is not a zip file"),
    "a pointer": (
        lambda folder: pickle(folder).write_text("version https://git-lfs.github.com/spec/v1\n"),
        f"{BIN} is a pointer of git-lfs in the place of the file; git lfs pull brings it",
    ),
    "compressed": (
        deflate,
        f"{BIN} is a compressed archive, which torch.save does not write",
    ),
    "a command": (
        with_value(Called()),
        f"{BIN} has more than tensors (posix.system), and no code is run",
    ),
    "an object": (
        with_value(Namespace(a=1)),
        f"{BIN} has more than tensors (argparse.Namespace), and no code is run",
    ),
    "a number": (with_value(3), f"{BIN} has '{NORM}', which is no plain tensor"),
    "a sparse tensor": (
        with_value(torch.eye(3).to_sparse()),
        f"{BIN} has '{NORM}', which is no plain tensor",
    ),
    "a list": (a_list, f"{BIN} has no tensors by name"),
    "another type": (
        with_value(torch.ones(32).long()),
        f"{BIN}: {NORM} is of type int64, not F32, BF16, F16, F8_E4M3",
    ),
    "another shape": (
        with_value(torch.ones(3)),
        f"{BIN}: {NORM} has the shape [3] instead of [32]",
    ),
    "protocol 4": (
        lambda folder: pickle(folder, pickle_protocol=4),
        f"{BIN} is damaged, or not of pickle protocol 2",
    ),
    "of long ago": (
        lambda folder: pickle(folder, _use_new_zipfile_serialization=False),
        f"{BIN} is as torch saved before 1.6, and cannot be read by part; torch.save of what "
        "torch.load(…, weights_only=True) returns mends it",
    ),
    "a missing part": (
        missing_part,
        "pytorch_model-00002-of-00002.bin is missing, which has model.embed_tokens.weight",
    ),
    "of another kind": (
        lambda folder: (folder / "model.safetensors").rename(folder / "consolidated.00.pth"),
        "has neither model.safetensors nor model.safetensors.index.json, but consolidated.00.pth",
    ),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_pickles_are_one_line(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    save_random("llama", tmp_path)
    break_it, expected = FAULTS[fault]
    break_it(tmp_path)
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path)
    assert str(refused.value) == f"{KEY}={tmp_path}: {expected}"
    assert not (tmp_path / "ran").exists()


def test_whatever_is_wrong_with_a_pickle_is_one_line(tmp_path: Path):
    """Or says nothing of the model: in data that are read, or names of the archive."""
    save_random("llama", tmp_path)
    path, random = pickle(tmp_path), Random(5)
    plain, lines = path.read_bytes(), []
    start = plain.index(b"data.pkl")
    for _ in range(60):
        data = bytearray(plain)
        at = random.randrange(start + 8, start + 3000)
        if random.random() < 0.3:
            del data[at + random.randrange(len(data) - at) :]
        data[at] ^= 1 << random.randrange(8)
        path.write_bytes(data)
        try:
            loaded(tmp_path)
        except ConfigError as error:
            lines.append(str(error))
    assert len(lines) > 30 and all("\n" not in line and len(line) < 500 for line in lines)
    assert not [line for line in lines if "False" in line]


def test_scales_need_a_description_in_pickles_too(tmp_path: Path):
    folder = tmp_path / "fp8"
    save_fp8("llama", folder, of_groups("channel"), per_row, "_scale")
    pickle(folder)
    edit_config(folder, quantization_config=...)
    with pytest.raises(ConfigError, match=f"{BIN}: .* is of type F8_E4M3 without a block size"):
        loaded(folder)


def test_tensors_are_the_type_that_they_have(tmp_path: Path):
    def half(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: value.half() for name, value in tensors.items()}

    save_random("llama", tmp_path)
    pickle(tmp_path, half)
    assert Pretrained(tmp_path, KEY).dtype == torch.float16
