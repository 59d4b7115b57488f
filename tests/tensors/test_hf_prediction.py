"""Multi-token prediction in the files of DeepSeek-V3 and GLM-4.5: read, computed with the layer of
`transformers`, and written again bit by bit.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.config import ModelConfig
from app.config.model import MTPConfig
from app.data.feed import make_batch
from app.errors import ConfigError
from app.hf.chunks import fill_chunks
from app.hf.families import family_of
from app.hf.file_names import CONFIG_JSON, ONE_FILE
from app.hf.pretrained import Pretrained
from app.hf.write import Export, as_json
from app.model.ahead import AHEAD, AheadLosses, shifted
from app.model.chunk import Chunk
from app.plan.sharding.blocks import ShardCoords
from tests.hf_folders import FAMILIES, KEY, edit_config, edit_tensors, load_file, transformers
from tests.tensors.hf_parity import CASES
from tests.tensors.hf_weights import Held, spread_weights
from tests.tensors.models import draw_tokens, make_chunk

ONE = dataclasses.replace(ModelConfig(), mtp=MTPConfig(1, 0.5))
DECODER = 3  # layers


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def theirs(request: pytest.FixtureRequest) -> torch.nn.Module:
    """A model whose last layer is the one that will predict ahead."""
    build, config, _ = CASES[FAMILIES[request.param]]()
    config.num_hidden_layers = DECODER + 1
    model = build(config).eval()
    spread_weights(model)
    return model


@pytest.fixture
def folder(theirs: torch.nn.Module, tmp_path: Path) -> Path:
    """Its files as DeepSeek publishes them, with copies of the tables of tokens."""
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=True)
    width = theirs.config.hidden_size
    generator = torch.Generator().manual_seed(3)
    names = dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (width,))
    names["eh_proj.weight"] = (width, 2 * width)
    more = {name: torch.rand(shape, generator=generator) / 4 for name, shape in names.items()}
    more["embed_tokens.weight"] = theirs.model.embed_tokens.weight.detach().clone()
    more["shared_head.head.weight"] = theirs.lm_head.weight.detach().clone()
    prefixed = {f"model.layers.{DECODER}.{name}": value for name, value in more.items()}
    edit_tensors(tmp_path / "theirs", lambda held: held.update(prefixed))
    edit_config(tmp_path / "theirs", num_hidden_layers=DECODER, num_nextn_predict_layers=1)
    return tmp_path / "theirs"


def read(folder: Path) -> Chunk:
    pretrained = Pretrained(folder, KEY, ONE)
    chunk = make_chunk(pretrained.model)
    fill_chunks([chunk], pretrained, ShardCoords())
    return chunk


@torch.no_grad()
def their_loss(model: torch.nn.Module, folder: Path, tokens_BS1: Tensor) -> float:
    """Nats per token of the token after the next one, by the layers of `transformers`."""
    held = load_file(folder / ONE_FILE)
    one = {name: held[f"model.layers.{DECODER}.{name}.weight"] for name in
           ("enorm", "hnorm", "eh_proj", "shared_head.norm")}  # fmt: skip
    tokens_BS, eps = tokens_BS1[:, :-1], model.config.rms_norm_eps

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    hidden = model.model(tokens_BS, output_hidden_states=True).hidden_states[DECODER]
    h = normed(hidden, model.model.norm.weight)[:, :-1]
    e = model.model.embed_tokens(tokens_BS[:, 1:])
    x = torch.cat((normed(e, one["enorm"]), normed(h, one["hnorm"])), dim=-1) @ one["eh_proj"].T
    positions = torch.arange(x.shape[1])[None]
    rotary = model.model.rotary_emb(x, positions)
    mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
    x = model.model.layers[DECODER](x, attention_mask=mask, position_embeddings=rotary)
    x = x[0] if isinstance(x, tuple) else x
    logits = model.lm_head(normed(x, one["shared_head.norm"]))
    return float(F.cross_entropy(logits.flatten(0, 1), tokens_BS1[:, 2:].flatten()))


def test_its_loss_is_that_of_their_layer(theirs: torch.nn.Module, folder: Path):
    chunk = read(folder)
    losses = AheadLosses(1, [chunk], torch.device("cpu"))
    rows = draw_tokens(chunk.model, 3, 17)
    batch = make_batch([*rows.numpy()], None)
    ahead = shifted(batch.tokens_BS, batch.labels_BS, batch.positions_BS, 1)
    context = chunk.context(batch.positions_BS, None, extras={AHEAD: ahead})
    chunk.losses_of(chunk(batch.tokens_BS, context).x, batch.labels_BS, context)
    found = losses.metrics(losses.sums())["mtp_loss"]["1"]
    assert float(found) == pytest.approx(their_loss(theirs, folder, rows), rel=1e-5)


def test_files_come_back_bit_by_bit(folder: Path, tmp_path: Path):
    chunk = read(folder)
    family = family_of(chunk.model, "test", folder)
    export = Export(chunk.model, family, tmp_path / "out", torch.float32)
    export.begin()
    for file in export.files():
        export.write(file, Held(chunk))
    config = family.written(chunk.model)
    assert config["num_nextn_predict_layers"] == 1
    export.finish({CONFIG_JSON: as_json(config)})
    was, now = (load_file(path / ONE_FILE) for path in (folder, tmp_path / "out"))
    assert was.keys() == now.keys()
    assert all(now[name].equal(value) for name, value in was.items())
    # transformers leaves the layer out, as it does with the published files
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type


def test_it_is_left_out_unless_asked_for(folder: Path):
    found = Pretrained(folder, KEY)
    assert found.model.mtp == MTPConfig()
    assert found.left_out() == f"left out: model.layers.{DECODER}, which predicts further tokens"
    assert Pretrained(folder, KEY, ONE).left_out() is None
    with pytest.raises(ConfigError, match=r"layers=2: .* has 1 layer of .*did you mean 1"):
        Pretrained(folder, KEY, dataclasses.replace(ONE, mtp=MTPConfig(2)))


def test_a_table_of_its_own_is_refused(folder: Path):
    name = f"model.layers.{DECODER}.shared_head.head.weight"
    edit_tensors(folder, lambda held: held.update({name: held[name] + 1}))
    Pretrained(folder, KEY)
    with pytest.raises(ConfigError, match=r"\.head\.weight differs from lm_head\.weight"):
        Pretrained(folder, KEY, ONE)


def test_families_without_it_say_so(folder: Path):
    with pytest.raises(ConfigError, match=r"llama, the closest, has no mtp\.layers=1"):
        family_of(ONE, "test", "here")
