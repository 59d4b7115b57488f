"""Adapters in the files of `peft`: adapter_config.json and adapter_model.safetensors.

A tensor is named after the linear layer that it adapts in the family's model. Experts have one
layer each there, as in `transformers` 4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from app.config import LoraConfig, ModelConfig
from app.errors import ConfigError
from app.hf import tables
from app.hf.families import Family, family_of
from app.hf.weight_part import WeightPart
from app.hf.write import WeightReader
from app.plan.model.lora import LINEARS
from app.plan.model.stage import NamedWeight, model_weights
from app.plan.model.weight import Weight
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.reshard import Block

KEY = "lora.init_from"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# keys of adapter_config.json, and the value without what is not built here
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    # the others, such as pissa, change the base too
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}
FITS = (tables.whole, tables.heads, tables.gate_up, tables.expert_gate_up, tables.expert_down)


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """Names of a model's adapters in the files of `peft`."""

    model: ModelConfig
    lora: LoraConfig
    family: Family

    @classmethod
    def of(cls, model: ModelConfig, lora: LoraConfig, key: str, value: object) -> AdapterNames:
        """Look up the model's family. Raises ConfigError for `key` without such files."""
        found = cls(model, lora, family_of(model, key, value))
        if odd := next((line for line in found._lines() if line.fit not in FITS), None):
            rule = f"models of type {found.family.model_type} store {odd.ours} otherwise than as"
            raise ConfigError(key, value, f"{rule} linear layers, which `peft` adapts")
        return found

    def _lines(self) -> Iterator[tables.NameLine]:
        for ours in {tables.layer_of(named.name)[1] for named in self._adapted()}:
            yield self._line(ours)

    def _line(self, ours: str) -> tables.NameLine:
        return next(line for line in self.family.table(self.model) if line.ours == ours)

    def _adapted(self) -> Iterator[NamedWeight]:
        weights = model_weights(self.model, self.lora)
        return (named for named in weights if named.weight.adapters)

    def parts(self) -> Iterator[tuple[NamedWeight, WeightPart]]:
        """Yield the weights of all adapters with the tensors that hold them."""
        for named in self._adapted():
            layer, ours = tables.layer_of(named.name)
            theirs = dict(zip(LINEARS[ours], self._line(ours).theirs, strict=True))
            by_name = {linear.rpartition(".")[2]: their for linear, their in theirs.items()}
            for adapter in named.weight.adapters:
                for letter, (name, weight) in zip("AB", adapter.weights(named.name), strict=True):
                    own = NamedWeight(name, weight)
                    tensor = tables.adapter_tensor(layer, by_name[adapter.name], letter)
                    for part in _parts(tensor, weight):
                        yield own, part

    def modules(self) -> list[str]:
        """Return the adapted linear layers for adapter_config.json: by their last names if that
        means the same layers of the model.
        """
        adapted = {_module(part.name) for _, part in self.parts()}
        last = sorted({module.rpartition(".")[2] for module in adapted})
        everything = LoraConfig(rank=self.lora.rank)
        others = AdapterNames(self.model, everything, self.family).parts()
        same = {
            each for _, part in others if (each := _module(part.name)).rpartition(".")[2] in last
        }
        return last if same == adapted else sorted(adapted)


def _module(tensor: str) -> str:
    return tensor.removeprefix(tables.ADAPTED).rpartition(".lora_")[0]


def _parts(tensor: str, weight: Weight) -> Iterator[WeightPart]:
    """Yield the tensors of a matrix: one, or a transposed one per expert."""
    if not weight.expert:
        yield WeightPart.same(tensor, weight.shape)
        return
    experts, rows, columns = weight.shape
    for expert in range(experts):
        ours = Block(weight.shape, (expert, 0, 0), (expert + 1, rows, columns))
        whole = Block.whole(1, columns, rows)
        yield WeightPart(tensor.format(expert=expert), (columns, rows), ours, whole, (0, 2, 1))


def adapter_files(names: AdapterNames, source: WeightReader) -> dict[str, bytes]:
    """Return the files of adapters by name, fp32 as the optimizer has them."""
    tensors = {}
    for own, part in names.parts():
        values = source.read(own.name, part.ours).permute(part.order)
        tensors[part.name] = values.reshape(part.shape).float().contiguous()
    lora, alpha = names.lora, names.lora.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": names.model.init_from,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": names.modules(),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    text = json.dumps(config, indent=2) + "\n"
    return {CONFIG: text.encode(), WEIGHTS: save(tensors, {"format": "pt"})}


class SavedAdapter:
    """Adapter in a folder, checked to be one of this model. Raises ConfigError."""

    def __init__(self, model: ModelConfig, lora: LoraConfig) -> None:
        self.folder = Path(str(lora.init_from))
        self.names = AdapterNames.of(model, lora, KEY, self.folder)
        self._check_config(model, lora)
        try:
            with safe_open(self.folder / WEIGHTS, "pt") as file:
                self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise self._refusal(f"{WEIGHTS} cannot be read: {error}") from error
        self._check_tensors()

    def left_out(self) -> str | None:
        """Return what training here leaves out of the adapter's settings, in words."""
        if not self.dropout:
            return None
        return f"lora_dropout={self.dropout:g} is left out: adapters have no dropout here"

    def fill(self, weights: Iterable[tuple[NamedWeight, Tensor]], coords: ShardCoords) -> None:
        """Fill this rank's parts of adapters in place."""
        parts: dict[str, list[WeightPart]] = {}
        for own, part in self.names.parts():
            parts.setdefault(own.name, []).append(part)
        for named, tensor in weights:
            for part in parts.get(named.name, ()):
                cut = part.within(coords.block(named.weight))
                if cut is not None:
                    read = self.tensors[part.name][tuple(slice(*each) for each in cut.region)]
                    values = read.reshape(cut.their_sizes).permute(part.order)
                    with torch.no_grad():
                        tensor.view(cut.held.sizes)[cut.box].copy_(values)

    def _check_config(self, model: ModelConfig, lora: LoraConfig) -> None:
        try:
            found = json.loads((self.folder / CONFIG).read_text(encoding="utf-8"))
            assert isinstance(found, dict)
        except (OSError, ValueError, AssertionError) as error:
            raise self._refusal(f"{CONFIG} cannot be read: {error}") from error
        for key, plain in PLAIN.items():
            if found.get(key, plain[0]) not in plain:
                raise self._refusal(f"{CONFIG} has {key}={found[key]!r}, which is not built here")
        asked = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}
        for (key, wanted), name in zip(asked.items(), ("rank", "alpha", "rslora"), strict=True):
            if (theirs := found.get(key, False)) != wanted:
                raise self._refusal(f"has {key}={theirs}, and lora.{name}={wanted}")
        self.dropout = float(found.get("lora_dropout") or 0)
        base, own = found.get("base_model_name_or_path"), model.init_from
        if base and own and Path(base).name.lower() != Path(own).name.lower():
            rule = f"was trained beside {base}, and model.init_from={own}"
            advice = f"name its base, or correct base_model_name_or_path in {CONFIG}"
            raise ConfigError(KEY, self.folder, rule, advice=advice)

    def _check_tensors(self) -> None:
        wanted = {part.name: part.shape for _, part in self.names.parts()}
        for name in (*wanted, *self.tensors):
            if name not in self.tensors:
                raise self._refusal(f"{WEIGHTS} lacks {name}, which lora.targets ask for")
            if name not in wanted:
                raise self._refusal(f"{WEIGHTS} has {name}, which lora.targets leave out")
            if (there := tuple(self.tensors[name].shape)) != wanted[name]:
                rule = f"is of another base: {name} has shape {there}, here {wanted[name]}"
                raise self._refusal(rule)

    def _refusal(self, rule: str) -> ConfigError:
        return ConfigError(KEY, self.folder, rule)
