"""Adapters in the files of `peft`: adapter_config.json and adapter_model.safetensors.

`app.hf.adapter_names` says which tensors they have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isclose, sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from app.config import LoraConfig, ModelConfig
from app.errors import ConfigError
from app.hf.adapter_names import (
    AdapterNames,
    any_joined,
    in_file,
    module_of,
    named_in_file,
    paths_of,
    pattern_of,
)
from app.hf.weight_part import Cut, WeightPart
from app.hf.write import WeightReader
from app.plan.model.stage import NamedWeight
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
    "layers_to_transform": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    # the others, such as pissa, change the base too
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}


def adapter_files(names: AdapterNames, source: WeightReader) -> dict[str, bytes]:
    """Return the files of adapters by name, fp32 as the optimizer has them."""
    tensors: dict[str, Tensor] = {}
    parts = {}
    for own, part in names.parts():
        order = [part.order.index(dim) for dim in range(len(part.order))]
        values = source.read(own.name, part.ours).permute(order)
        if part.name not in tensors:
            # adapters of one of their layers leave the others' rows out
            tensors[part.name] = torch.zeros(part.shape)
        place = _place(part)
        tensors[part.name][place] = values.reshape(tensors[part.name][place].shape).float()
        parts[part.name] = part
    named = named_in_file(tensors)
    written = {named[name]: value.view(in_file(parts[name])) for name, value in tensors.items()}
    text = json.dumps(_adapter_config(names), indent=2) + "\n"
    return {CONFIG: text.encode(), WEIGHTS: save(written, {"format": "pt"})}


def _place(part: WeightPart) -> tuple[slice, ...]:
    """Return where a whole part is in its tensor."""
    return tuple(
        slice(*each) for each in Cut(part, Block.whole(*part.ours.shape), part.ours).region
    )


def _adapter_config(names: AdapterNames) -> dict[str, Any]:
    """Return adapter_config.json: r and lora_alpha are those of the layers with most of ours; with
    parameters those of layers with fewest, as `peft` finds these by patterns of their own.
    """
    lora, (modules, parameters) = names.lora, names.targets()
    assert lora.rank is not None, "a run with adapters has a rank"
    counts = names.layers_in()
    most = max(counts.values())
    # scaled by alpha / r, not alpha / √r: joined layers have a larger r. `peft` joins gate and up
    plain = most > 1 or any(each.name == "gate_proj" for _, each in names.experts())
    plain = plain and (lora.rslora or most > 1)
    usual = min(counts.values()) if parameters else most
    others = {pattern_of(module): count for module, count in counts.items() if count != usual}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": names.model.init_from,
        "r": lora.rank * usual,
        "lora_alpha": _number(lora.scale * lora.rank * usual if plain else lora.alpha),
        "use_rslora": lora.rslora and not plain,
        # `peft` refuses to load it beside parameters
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "bias": "none",
        "target_modules": modules,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if others:
        config["rank_pattern"] = {name: lora.rank * count for name, count in others.items()}
        config["alpha_pattern"] = {
            name: _number(lora.scale * lora.rank * count) for name, count in others.items()
        }
    if parameters:
        config["target_parameters"] = parameters
    return config


def _number(alpha: float) -> float:
    return int(alpha) if alpha.is_integer() else alpha


class SavedAdapter:
    """Adapter in a folder, checked to be one of this model. Raises ConfigError."""

    def __init__(self, model: ModelConfig, lora: LoraConfig) -> None:
        self.folder = Path(str(lora.init_from))
        self._check_config(model, lora)
        try:
            with safe_open(self.folder / WEIGHTS, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise self._refusal(f"{WEIGHTS} cannot be read: {error}") from error
        names = AdapterNames.of(model, lora, KEY, self.folder, joins=any_joined(tensors))
        self.names = replace(names, shared=self._check_ranks(names))
        self.tensors = self._checked(tensors)

    def left_out(self) -> str | None:
        """Return what training here changes of the adapter, in words."""
        said, theirs, ours = [], self.dropout, self.names.lora.dropout
        if theirs not in (0, ours):
            said.append(f"its lora_dropout={theirs:g} is left out: lora.dropout={ours:g}")
        if self.names.shared:
            counts = self.names.layers_in().items()
            several = {module.rpartition(".")[2] for module, count in counts if count > 1}
            said.append(
                f"A of {', '.join(sorted(several))} is copied to each linear layer in it, which "
                "train apart"
            )
        return "; ".join(said) or None

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
        self.config = found
        self.dropout = float(found.get("lora_dropout") or 0)
        base, own = found.get("base_model_name_or_path"), model.init_from
        if base and own and Path(base).name.lower() != Path(own).name.lower():
            rule = f"was trained beside {base}, and model.init_from={own}"
            advice = f"name its base, or correct base_model_name_or_path in {CONFIG}"
            raise ConfigError(KEY, self.folder, rule, advice=advice)

    def _check_ranks(self, names: AdapterNames) -> bool:
        """Return whether linear layers that are one in files share an A (`AdapterNames.shared`).

        Refuses ranks and scales of adapters other than those of the run.
        """
        lora, shared = names.lora, set[bool]()
        assert lora.rank is not None, "a run with adapters has a rank"
        rslora = bool(self.config.get("use_rslora", False))
        for module, count in names.layers_in().items():
            rank, where = self._told("rank_pattern", module, self.config.get("r"))
            alpha, place = self._told("alpha_pattern", module, self.config.get("lora_alpha", 8))
            if rank not in (lora.rank, count * lora.rank):
                raise self._refusal(f"has r={rank}{where}, and lora.rank={lora.rank}")
            if not isclose(alpha / (sqrt(rank) if rslora else rank), lora.scale):
                theirs = f"lora_alpha={alpha}{place}, r={rank}{where}, use_rslora={rslora}"
                rule = f"has {theirs}, and lora.alpha={lora.alpha:g}, lora.rslora={lora.rslora}"
                raise self._refusal(rule)
            if count > 1:
                shared.add(rank == lora.rank)
        if len(shared) > 1:
            raise self._refusal(f"has r={lora.rank} for some joined layers, and more for others")
        return shared == {True}

    def _told(self, patterns: str, module: str, usual: Any) -> tuple[Any, str]:
        """Return a layer's value among patterns of its path, and in words which one tells it."""
        found = self.config.get(patterns) or {}
        if not isinstance(found, Mapping):
            raise self._refusal(f"{CONFIG} has {patterns}={found!r}, which are no patterns")
        for pattern, value in found.items():
            try:
                here = any(re.match(rf"(.*\.)?({pattern})$", path) for path in paths_of(module))
            except re.error as error:
                raise self._refusal(f"{CONFIG} has {patterns} {pattern!r}: {error}") from error
            if here:
                return value, f" for {module}"
        return usual, ""

    def _checked(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in their parts' shapes, without names and shapes that do not fit."""
        parts = {part.name: part for _, part in self.names.parts()}
        wanted = named_in_file(parts)
        for name in (*wanted.values(), *tensors):
            if name not in tensors:
                raise self._refusal(f"{WEIGHTS} lacks {name}, which lora.targets ask for")
            if name not in wanted.values():
                raise self._refusal(f"{WEIGHTS} has {name}, which lora.targets leave out")
        found = {}
        for name, part in parts.items():
            there, here = tensors[wanted[name]], in_file(part)
            if tuple(there.shape) != here:
                shape = tuple(there.shape)
                rule = f"is of another base: {wanted[name]} has shape {shape}, here {here}"
                raise self._refusal(rule)
            found[name] = there.view(part.shape)
        self._check_blocks(found)
        return found

    def _check_blocks(self, tensors: dict[str, Tensor]) -> None:
        """Refuse a B whose columns adapt rows of several of our linear layers."""
        if self.names.shared:
            return
        joined = {module for module, count in self.names.layers_in().items() if count > 1}
        rest = {name: value for name, value in tensors.items() if module_of(name) in joined}
        rest = {name: value.clone() for name, value in rest.items()}
        for _, part in self.names.parts():
            if part.name in rest:
                rest[part.name][_place(part)] = 0
        for name, value in rest.items():
            if value.any():
                rule = f"has one pair of matrices for the linear layers in {module_of(name)}, and"
                rank = self.names.lora.rank
                raise self._refusal(f"{rule} lora.rank={rank} one for each")

    def _refusal(self, rule: str) -> ConfigError:
        return ConfigError(KEY, self.folder, rule)
