"""Adapters in the files of `peft`: adapter_config.json and adapter_model.safetensors.

A tensor is named after the linear layer that it adapts in the family's model. Experts have one
layer each there, as in `transformers` 4, or one pair of matrices for all (`target_parameters`):
GPT-OSS, and where `lora.targets` name `gate_up_proj`. `peft` stacks the experts' A, E·r × inputs,
and interleaves their B, outputs × r·E.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isclose, prod, sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from app.config import LoraConfig, ModelConfig
from app.errors import ConfigError
from app.hf import fits, tables
from app.hf.families import family_of
from app.hf.family import Family
from app.hf.weight_part import WeightPart
from app.hf.write import WeightReader
from app.plan.model.lora import GATE_UP, LINEARS
from app.plan.model.stage import NamedWeight, model_weights
from app.plan.model.weight import Adapter, Weight
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
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    # the others, such as pissa, change the base too
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}
ONE_EACH = (fits.whole, fits.heads, fits.gate_up, fits.expert_gate_up, fits.expert_down)
EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)\.(lora_[AB]\.weight)")
WRAPPED = ".base_layer"  # around the inner of two parameters of one module


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """Names of a model's adapters in the files of `peft`."""

    model: ModelConfig
    lora: LoraConfig
    family: Family
    joins: bool = (
        False  # True where experts are one parameter in files that could have a layer each
    )

    @classmethod
    def of(
        cls, model: ModelConfig, lora: LoraConfig, key: str, value: object, *, joins: bool = False
    ) -> AdapterNames:
        """Look up the model's family. Raises ConfigError for `key` without such files."""
        found = cls(model, lora, family_of(model, key, value), joins)
        if odd := next((each for each in found._adapted() if not found._fits(each)), None):
            rule = f"models of type {found.family.model_type} store {odd.name} otherwise than as"
            rule, advice = f"{rule} linear layers, which `peft` adapts", None
            if odd.weight.expert and not found._apart(odd):
                rule = "adapts gate and up of experts by one pair of matrices, lora.targets by two"
                advice = "name gate_up_proj in lora.targets"
            raise ConfigError(key, value, rule, advice=advice)
        return found

    @property
    def stacked(self) -> bool:
        """True if the experts of a layer are one parameter in the files, not a layer each."""
        return (
            self.joins
            or any(GATE_UP.endswith(f".{each.name}") for _, each in self.experts())
            or any(
                self._line(tables.layer_of(named.name)[1]).fit not in ONE_EACH
                for named, _ in self.experts()
            )
        )

    def experts(self) -> Iterator[tuple[NamedWeight, Adapter]]:
        """Yield the adapters of experts with their weights."""
        for named in self._adapted():
            yield from ((named, each) for each in named.weight.adapters if named.weight.expert)

    def _fits(self, named: NamedWeight) -> bool:
        """Return whether files can hold the adapters of a weight."""
        ours = tables.layer_of(named.name)[1]
        line = self._line(ours)
        # several adapters, of one linear layer in files
        joined = bool(named.weight.fused) and len(line.theirs) < len(LINEARS.get(ours, ()))
        if joined or self._apart(named):
            return False
        fit = line.fit
        if not named.weight.expert or not self.stacked:
            return fit in ONE_EACH
        two = {each.name for each in named.weight.adapters}.intersection(("gate_proj", "up_proj"))
        return not two

    def _apart(self, named: NamedWeight) -> bool:
        """Return whether versions of `transformers` have modules of other names and kinds."""
        return self._line(tables.layer_of(named.name)[1]) in tables.GRANITE_EXPERTS

    def _line(self, ours: str) -> tables.NameLine:
        return next(line for line in self.family.table(self.model) if line.ours == ours)

    def _adapted(self) -> Iterator[NamedWeight]:
        weights = model_weights(self.model, self.lora)
        return (named for named in weights if named.weight.adapters)

    def parts(self) -> Iterator[tuple[NamedWeight, WeightPart]]:
        """Yield the weights of all adapters with the tensors that hold them.

        Those of all experts of a layer have dimensions apart that `peft` joins (`joined`).
        """
        stacked = self.stacked
        for named in filter(self._fits, self._adapted()):  # all of them but for `targets`
            layer, ours = tables.layer_of(named.name)
            line = self._line(ours)
            for adapter in named.weight.adapters:
                for letter, (name, weight) in zip("AB", adapter.weights(named.name), strict=True):
                    own = NamedWeight(name, weight)
                    if weight.expert and stacked:
                        alternates = line.fit is fits.alternating
                        theirs = f"mlp.experts.{adapter.name}"
                        tensor = tables.adapter_tensor(layer, theirs, letter)
                        yield own, _stacked(tensor, weight, alternates=alternates)
                        continue
                    theirs = _their_layers(line, ours)[adapter.name]
                    layers = self.family.layers_name
                    tensor = tables.adapter_tensor(layer, theirs, letter, layers)
                    for part in _parts(tensor, weight):
                        yield own, part

    def targets(self) -> tuple[list[str], list[str]]:
        """Return the adapted linear layers and the adapted parameters for adapter_config.json: by
        their last names if that means the same layers of the model.

        In models with experts, `peft` takes gate_proj, up_proj and down_proj of a list of layers
        for those of experts and leaves out other feed-forwards (`transformers` 5); it finds these
        as parameters. A router is a layer in some versions of `transformers`, which `peft` knows,
        and a parameter in GPT-OSS.
        """
        adapted = {_module(part.name) for _, part in self.parts()}
        parameters = set[str]()
        if self.model.moe is not None:
            parameters = {each for each in adapted if _fed_forward(each)}
            parameters |= {each for each in adapted if each.endswith(".mlp.router")}
        of_experts = {each for each in adapted if EXPERTS.fullmatch(f"{each}.lora_A.weight")}
        adapted -= parameters | of_experts
        last = sorted({module.rpartition(".")[2] for module in adapted})
        everything = LoraConfig(rank=self.lora.rank, targets=("self_attn", "mlp", "gate"))
        others = AdapterNames(self.model, everything, self.family).modules() - parameters
        same = {each for each in others if each.rpartition(".")[2] in last}
        within = {f"{each}.weight" for each in parameters} | of_experts
        return (
            last if same == adapted else sorted(adapted),
            sorted({tables.layer_of(each.removeprefix("model."))[1] for each in within}),
        )

    def modules(self) -> set[str]:
        """Return the paths of all adapted layers."""
        return {_module(part.name) for _, part in self.parts()}


def _their_layers(line: tables.NameLine, ours: str) -> dict[str, str]:
    """Return their name of each linear layer of a weight, by ours."""
    linears = (linear.rpartition(".")[2] for linear in LINEARS.get(ours, ("gate",)))
    # without a gate the first is not there
    return dict(zip([*linears][-len(line.theirs) :], line.theirs, strict=True))


def _module(tensor: str) -> str:
    return tensor.removeprefix(tables.ADAPTED).rpartition(".lora_")[0]


def _fed_forward(module: str) -> bool:
    """Return whether it is a linear layer of a feed-forward that is not an expert's."""
    last = module.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")
    return last and ".experts." not in module


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


def _stacked(tensor: str, weight: Weight, *, alternates: bool) -> WeightPart:
    """Return the tensor of all experts: A as E × r × inputs, B as outputs × r × E; `alternates`:
    gate and up alternate in the outputs.
    """
    order: tuple[int, ...]
    if ".lora_A." in tensor:
        order = 0, 2, 1
    elif len(weight.shape) == 3:
        order = 2, 1, 0
    else:  # gate and up are a dimension of their own
        order = (3, 2, 1, 0) if alternates else (3, 2, 0, 1)
    theirs = [0] * len(order)
    for mine, other in enumerate(order):
        theirs[other] = weight.shape[mine]
    whole = Block.whole(*theirs)
    return WeightPart(tensor, tuple(theirs), Block.whole(*weight.shape), whole, order)


def joined(part: WeightPart) -> tuple[int, ...]:
    """Return the shape of a part's tensor in the file, where `peft` joins dimensions."""
    if len(part.shape) == 2:
        return part.shape
    if ".lora_A." in part.name:
        return part.shape[0] * part.shape[1], part.shape[2]
    return prod(part.shape[:-2]), part.shape[-2] * part.shape[-1]


def in_files(tensors: Iterable[str]) -> dict[str, str]:
    """Return the name in files of every tensor.

    `peft` wraps a module with two adapted parameters twice: gate_up_proj first, then down_proj.
    """
    names = {}
    found = {name: match for name in tensors if (match := EXPERTS.fullmatch(name))}
    wrapped = {match[1] for match in found.values() if match[2] == "down_proj"}
    for name, match in found.items():
        inner = match[2] == "gate_up_proj" and match[1] in wrapped
        names[name] = f"{match[1]}{WRAPPED if inner else ''}.{match[3]}"
    return {name: names.get(name, name) for name in tensors}


def adapter_files(names: AdapterNames, source: WeightReader) -> dict[str, bytes]:
    """Return the files of adapters by name, fp32 as the optimizer has them."""
    parts = list(names.parts())
    named, tensors = in_files([part.name for _, part in parts]), {}
    for own, part in parts:
        order = [part.order.index(dim) for dim in range(len(part.order))]
        values = source.read(own.name, part.ours).permute(order)
        tensors[named[part.name]] = values.reshape(joined(part)).float().contiguous()
    lora, (modules, parameters) = names.lora, names.targets()
    # as plain alpha / r: where `peft` joins gate and up, it doubles alpha and r
    plain = lora.rslora and any(each.name == "gate_proj" for _, each in names.experts())
    alpha = lora.scale * lora.rank if plain and lora.rank else lora.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": names.model.init_from,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "use_rslora": lora.rslora and not plain,
        # `peft` refuses to load it beside parameters
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "bias": "none",
        "target_modules": modules,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if parameters:
        config["target_parameters"] = parameters
    text = json.dumps(config, indent=2) + "\n"
    return {CONFIG: text.encode(), WEIGHTS: save(tensors, {"format": "pt"})}


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
        joins = any(".mlp.experts.lora_" in name for name in tensors)
        self.names = AdapterNames.of(model, lora, KEY, self.folder, joins=joins)
        self.tensors = self._checked(tensors)

    def left_out(self) -> str | None:
        """Return what training here leaves out of the adapter's settings, in words."""
        theirs, ours = self.dropout, self.names.lora.dropout
        if theirs in (0, ours):
            return None
        return f"its lora_dropout={theirs:g} is left out: lora.dropout={ours:g}"

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
        assert lora.rank is not None, "a run with adapters has a rank"
        if (rank := found.get("r")) != lora.rank:
            raise self._refusal(f"has r={rank}, and lora.rank={lora.rank}")
        alpha, rslora = found.get("lora_alpha", 8), bool(found.get("use_rslora", False))
        if not isclose(alpha / (sqrt(lora.rank) if rslora else lora.rank), lora.scale):
            theirs = f"lora_alpha={alpha}, use_rslora={rslora}"
            rule = f"has {theirs}, and lora.alpha={lora.alpha:g}, lora.rslora={lora.rslora}"
            raise self._refusal(rule)
        self.dropout = float(found.get("lora_dropout") or 0)
        base, own = found.get("base_model_name_or_path"), model.init_from
        if base and own and Path(base).name.lower() != Path(own).name.lower():
            rule = f"was trained beside {base}, and model.init_from={own}"
            advice = f"name its base, or correct base_model_name_or_path in {CONFIG}"
            raise ConfigError(KEY, self.folder, rule, advice=advice)

    def _checked(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in their parts' shapes, without names and shapes that do not fit."""
        parts = {part.name: part for _, part in self.names.parts()}
        wanted = in_files(parts)
        for name in (*wanted.values(), *tensors):
            if name not in tensors:
                raise self._refusal(f"{WEIGHTS} lacks {name}, which lora.targets ask for")
            if name not in wanted.values():
                raise self._refusal(f"{WEIGHTS} has {name}, which lora.targets leave out")
        found = {}
        for name, part in parts.items():
            there, here = tensors[wanted[name]], joined(part)
            if tuple(there.shape) != here:
                shape = tuple(there.shape)
                rule = f"is of another base: {wanted[name]} has shape {shape}, here {here}"
                raise self._refusal(rule)
            found[name] = there.view(part.shape)
        return found

    def _refusal(self, rule: str) -> ConfigError:
        return ConfigError(KEY, self.folder, rule)
