"""Folders of small random Hugging Face models, saved by `transformers`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor, nn

from app.config import ModelConfig
from app.hf.chunks import fill_chunks
from app.hf.file_names import PICKLE, PICKLE_INDEX
from app.hf.pretrained import Pretrained
from app.model.chunk import Chunk
from app.plan.sharding.blocks import ShardCoords
from tests.tensors.hf_parity import CASES
from tests.tensors.hf_weights import spread_weights
from tests.tensors.models import make_chunk

transformers = pytest.importorskip("transformers")

KEY = "model.init_from"
# a case of each family, of those that tests/tensors/test_hf_parity.py compares
FAMILIES = {
    "llama": "llama-gqa",
    "llama3.1": "llama-3.1",
    "llama-tied": "llama-gqa-tied",
    "mistral": "mistral",
    "ministral": "ministral",
    "smollm3": "smollm3",
    "qwen2": "qwen2-gqa",
    "qwen2-windows": "qwen2-windows",
    "qwen3": "qwen3-gqa",
    "qwen3-windows": "qwen3-windows",
    "mixtral": "mixtral-gqa",
    "gemma2": "gemma2",
    "gemma2-no-caps": "gemma2-no-caps",
    "gemma3_text": "gemma3",
    "gemma3_text-cap": "gemma3-cap",
    "exaone4": "exaone4",
    "exaone4-no-windows": "exaone4-no-windows",
    "cohere2": "cohere2",
    "olmo2": "olmo2-gqa",
    "olmo3": "olmo3",
    "llama-biases": "llama-biases",
    "qwen3-biases": "qwen3-biases",
    "qwen3_moe-biases": "qwen3-moe-biases",
    "seed_oss-biases": "seed-oss-biases",
    "smollm3-biases": "smollm3-biases",
    "olmo2-biases": "olmo2-biases",
    "olmoe-biases": "olmoe-biases",
    "gemma2-biases": "gemma2-biases",
    "gemma3_text-biases": "gemma3-biases",
    "gemma3_text-linear": "gemma3-linear",
    "gemma3_text-linear-same-base": "gemma3-linear-same-base",
    "cohere2-biases": "cohere2-biases",
    "deepseek_v2-biases": "deepseek-v2-biases",
    "olmo3-yarn": "olmo3-yarn",
    "olmoe": "olmoe-gqa",
    "gpt_oss": "gpt-oss",
    "qwen3_moe": "qwen3-moe-every-second-layer",
    "llama-linear": "llama-linear",
    "llama-longrope": "llama-longrope",
    "llama-dynamic": "llama-dynamic",
    "llama-yarn": "llama-yarn-not-truncated",
    "seed_oss": "seed-oss",
    "seed_oss-tied": "seed-oss-tied",
    "qwen2_moe": "qwen2-moe",
    "qwen2_moe-top-1": "qwen2-moe-top-1",
    "qwen3_next": "qwen3-next",
    "qwen3_5_text": "qwen3-5",
    "qwen3_5_text-tied": "qwen3-5-tied",
    "qwen3_5_moe_text": "qwen3-5-moe",
    "glm4_moe_lite": "glm4-moe-lite",
    "glm4_moe": "glm4-moe",
    "glm4_moe-whole-heads": "glm4-moe-whole-heads",
    "glm4_moe-yarn": "glm4-moe-quarter-yarn",
    "minimax_m2": "minimax-m2",
    "minimax_m2-top-1": "minimax-m2-top-1-whole-heads",
    "ernie4_5": "ernie4-5",
    "ernie4_5-biases": "ernie4-5-biases",
    "ernie4_5_moe": "ernie4-5-moe",
    "ernie4_5_moe-no-shared": "ernie4-5-moe-no-shared",
    "ernie4_5_moe-every-second": "ernie4-5-moe-every-second",
    "kimi_k2": "kimi-k2",
    "starcoder2": "starcoder2",
    "starcoder2-no-biases": "starcoder2-no-biases",
    "nemotron": "nemotron",
    "nemotron-biases": "nemotron-biases",
    "gpt_neox": "gpt-neox",
    "gpt_neox-sequential": "gpt-neox-sequential",
    "phi3": "phi3",
    "phi3-whole": "phi3-whole",
    "phi3-long": "phi3-long",
    "granite": "granite",
    "granite-biases": "granite-biases",
    "granitemoe": "granitemoe",
    "granitemoe-biases": "granitemoe-biases",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v2-lite": "deepseek-v2-lite",
    "deepseek_v3": "deepseek-v3",
    "deepseek_v3-large-eps": "deepseek-v3-large-eps",
    "deepseek_v3-top-1": "deepseek-v3-top-1",
    "deepseek_v3-top-1-not-normalised": "deepseek-v3-top-1-not-normalised",
}

NO_CLASS = ("kimi_k2",)  # types without a class of their own


def save_random(
    name: str, folder: Path, *, per_expert: bool = True, vocab_size: int | None = None
) -> tuple[Any, ModelConfig]:
    """Save a model of a family; returns it, and what we call its architecture.

    `per_expert`: a tensor for each expert, as published models have; else one for all of a layer.
    `vocab_size`: another one than the case has.
    """
    build, theirs, ours = CASES[FAMILIES[name]]()
    if vocab_size is not None:
        theirs.vocab_size = vocab_size
        ours = dataclasses.replace(ours, vocab_size=vocab_size)
    model = build(theirs).eval()
    spread_weights(model)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder, save_original_format=per_expert)
    if name in NO_CLASS:
        edit_config(folder, model_type=name)
    return model, ours


def save_byte_level(path: Path) -> None:
    """A tokenizer of all bytes, whose ids are not those of `bytes`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate(["<|endoftext|>", *alphabet])}
    tokenizer = Tokenizer(BPE(ids, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def loaded(folder: Path) -> Chunk:
    """The whole model of a folder as one of ours."""
    found = Pretrained(folder, KEY)
    chunk = make_chunk(found.model)
    fill_chunks([chunk], found, ShardCoords())
    return chunk


@torch.no_grad()
def their_logits(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    """Logits of `transformers`."""
    logits: Tensor = model(input_ids=tokens_BS, use_cache=False).logits
    return logits


def edit_config(folder: Path, **changes: Any) -> None:
    """Change values of its config.json; ... takes one out."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of its one file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def split_into_two(folder: Path) -> None:
    """Have two files and an index in the place of its one file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    half = len(names) // 2
    index: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    listed = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))


def pickle(folder: Path, edit: Callable[[dict[str, Any]], object] = len, **how: Any) -> Path:
    """Have torch.save's file in the place of the safetensors."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    edit(tensors)
    torch.save(tensors, folder / PICKLE, **how)
    return folder / PICKLE


def split_pickle(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for number, part in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / PICKLE_INDEX).write_text(json.dumps({"weight_map": index}))
