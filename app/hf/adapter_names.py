"""Tensors of adapters in the files of `peft`, and the boxes of ours that they hold.

A tensor is named after the linear layer that it adapts in the family's model. Experts have one
layer each there, as in `transformers` 4, or one pair of matrices for all (`target_parameters`):
GPT-OSS, Granite-MoE, and where `lora.targets` name `gate_up_proj`. `peft` stacks the experts' A,
E·r × inputs, and interleaves their B, outputs × r·E.

Where files hold n of our linear layers as one, such as the queries, keys and values of Phi-3, their
adapters are one of rank n·r: it stacks their A, and its B has r columns for each, which are zero
but for that layer's rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from app.config import LoraConfig, ModelConfig
from app.hf import fits, tables
from app.hf.family import Family
from app.hf.started import family_as_started
from app.hf.weight_part import WeightPart
from app.plan.model.lora import GATE_UP, LINEARS
from app.plan.model.stage import NamedWeight, model_weights
from app.plan.model.weight import Adapter
from app.plan.sharding.reshard import Block

ONE_EACH = (fits.expert_gate_up, fits.expert_down)
EXPERTS = re.compile(r"(.*\.(?:mlp|block_sparse_moe)\.experts)\.(gate_up_proj|down_proj)")
ROUTERS = (".mlp.router", ".block_sparse_moe.router")  # of which `peft` adapts a parameter
WRAPPED = ".base_layer"  # around the inner of two parameters of one module
EVERYTHING = "self_attn", "linear_attn", "mlp", "gate"
Held = tuple[NamedWeight, WeightPart]


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """Names of a model's adapters in the files of `peft`."""

    model: ModelConfig
    lora: LoraConfig
    family: Family
    # True where experts are one parameter in files that could have a layer each
    joins: bool = False
    # True where linear layers that files hold as one share an A of rank r, as `peft` trains them
    shared: bool = False

    @classmethod
    def of(
        cls, model: ModelConfig, lora: LoraConfig, key: str, value: object, *, joins: bool = False
    ) -> AdapterNames:
        """Look up the model's family. Raises ConfigError for `key` without one."""
        return cls(model, lora, family_as_started(model, key, value), joins)

    @property
    def stacked(self) -> bool:
        """True if the experts of a layer are one parameter in the files, not a layer each."""
        return (
            self.joins
            or any(GATE_UP.endswith(f".{each.name}") for _, each in self.experts())
            or any(
                self._lines(tables.layer_of(named.name)[1])[0].fit not in ONE_EACH
                for named, _ in self.experts()
            )
        )

    def experts(self) -> Iterator[tuple[NamedWeight, Adapter]]:
        """Yield the adapters of experts with their weights."""
        for named in self._adapted():
            yield from ((named, each) for each in named.weight.adapters if named.weight.expert)

    def parts(self) -> Iterator[Held]:
        """Yield the weights of all adapters with the tensors that hold them.

        Those of all experts of a layer have dimensions apart that `peft` joins (`in_file`).
        """
        stacked = self.stacked
        for named in self._adapted():
            if not named.weight.expert:
                yield from self._of_linears(named)
            elif stacked:
                yield from self._of_all_experts(named)
            else:
                yield from self._of_each_expert(named)

    def layers_in(self) -> dict[str, int]:
        """Return the adapted linear layers and parameters of the files, and how many of our linear
        layers each has: their paths.
        """
        found: dict[str, set[str]] = {}
        for own, part in self.parts():
            if ".lora_A." in part.name:
                found.setdefault(module_of(part.name), set()).add(own.name)
        return {module: len(ours) for module, ours in found.items()}

    def targets(self) -> tuple[list[str], list[str]]:
        """Return the adapted linear layers and the adapted parameters for adapter_config.json: by
        their last names if that means the same layers of the model.

        In models with experts, `peft` takes gate_proj, up_proj and down_proj of a list of layers
        for those of experts and leaves out other feed-forwards (`transformers` 5); it finds these
        as parameters. A router is a layer in some versions of `transformers`, which `peft` knows,
        and a parameter in GPT-OSS and Granite-MoE.
        """
        adapted = set(self.layers_in())
        parameters = set[str]()
        if self.model.moe is not None:
            parameters = {each for each in adapted if _fed_forward(each) or each.endswith(ROUTERS)}
        of_experts = {each for each in adapted if EXPERTS.fullmatch(each)}
        adapted -= parameters | of_experts
        last = sorted({module.rpartition(".")[2] for module in adapted})
        everything = LoraConfig(rank=self.lora.rank, targets=EVERYTHING)
        others = {*AdapterNames(self.model, everything, self.family).layers_in()} - parameters
        same = {each for each in others if each.rpartition(".")[2] in last}
        within = {f"{each}.weight" for each in parameters} | of_experts
        return (
            last if same == adapted else sorted(adapted),
            sorted({tables.layer_of(each.removeprefix("model."))[1] for each in within}),
        )

    def _of_linears(self, named: NamedWeight) -> Iterator[Held]:
        """Yield those of a weight of linear layers: B has the rows of the weight."""
        layer, ours = tables.layer_of(named.name)
        line, rank, pairs = self._line(ours), self.lora.rank, named.weight.adapters
        assert rank is not None, "a run with adapters has a rank"
        tensors = [
            tables.adapter_tensor(layer, theirs, "B", self.family.layers_name)
            for theirs in line.theirs
        ]
        alternate = line.fit is fits.whole and pairs[0].of > 1
        fit = fits.heads_in_turn if alternate else line.fit
        rows = [*fit(self.model, (*named.weight.shape[:-1], rank), tensors)]
        own = [[part for each in rows if (part := _rows_of(pair, each))] for pair in pairs]
        for pair, parts in zip(pairs, own, strict=True):
            beside = [each for each in own if each[0].name == parts[0].name]
            nth, count = (0, 1) if self.shared else (beside.index(parts), len(beside))
            a, b = (NamedWeight(*each) for each in pair.weights(named.name))
            first = parts[0].name.replace(".lora_B.", ".lora_A.")
            yield a, _stack(WeightPart.same(first, a.weight.shape), nth, count)
            yield from ((b, _beside(part, nth, count)) for part in parts)

    def _of_each_expert(self, named: NamedWeight) -> Iterator[Held]:
        """Yield those of experts that have a linear layer each: a transposed matrix per expert."""
        layer, ours = tables.layer_of(named.name)
        theirs = self._line(ours).theirs
        # without a gate the first linear layer is not there
        linears = [linear.rpartition(".")[2] for linear in LINEARS[ours]][-len(theirs) :]
        for pair in named.weight.adapters:
            module = theirs[linears.index(pair.name)]
            for letter, each in zip("AB", pair.weights(named.name), strict=True):
                own = NamedWeight(*each)
                tensor = tables.adapter_tensor(layer, module, letter, self.family.layers_name)
                experts, rows, columns = own.weight.shape
                for expert in range(experts):
                    box = Block(own.weight.shape, (expert, 0, 0), (expert + 1, rows, columns))
                    name, whole = tensor.format(expert=expert), Block.whole(1, columns, rows)
                    yield own, WeightPart(name, (columns, rows), box, whole, (0, 2, 1))

    def _of_all_experts(self, named: NamedWeight) -> Iterator[Held]:
        """Yield those of experts that are one parameter: of gate and up two adapters of one."""
        layer, ours = tables.layer_of(named.name)
        line, pairs = self._lines(ours)[-1], named.weight.adapters  # as in `transformers` 5
        for number, pair in enumerate(pairs):
            nth, count = (0, 1) if self.shared else (number, len(pairs))
            for letter, each in zip("AB", pair.weights(named.name), strict=True):
                own = NamedWeight(*each)
                layers = self.family.layers_name
                tensor = tables.adapter_tensor(layer, line.theirs[0], letter, layers)
                if letter == "A":
                    yield own, _stacked_a(tensor, own, nth, count)
                else:
                    alternates = line.fit is fits.alternating
                    yield own, _stacked_b(tensor, own, pair, nth, count, alternates=alternates)

    def _line(self, ours: str) -> tables.NameLine:
        """Return the line by whose names `peft` finds a weight's layers: it renames most of those
        of `transformers` 4.
        """
        lines = self._lines(ours)
        return lines[-1] if lines[0] in tables.GRANITE_EXPERTS else lines[0]

    def _lines(self, ours: str) -> list[tables.NameLine]:
        return [line for line in self.family.table(self.model) if line.ours == ours]

    def _adapted(self) -> Iterator[NamedWeight]:
        weights = model_weights(self.model, self.lora)
        return (named for named in weights if named.weight.adapters)


def module_of(tensor: str) -> str:
    """Return the path of the linear layer or parameter that a tensor belongs to."""
    return tensor.removeprefix(tables.ADAPTED).rpartition(".lora_")[0]


def paths_of(module: str) -> tuple[str, str]:
    """Return the paths that `peft` compares to patterns: of a layer, or of a layer's parameter."""
    return module, f"{module}.weight"


def pattern_of(module: str) -> str:
    """Return the end of a path by which `peft` finds what it adapts in a layer."""
    return ".".join(paths_of(module)[module.endswith(ROUTERS)].split(".")[-2:])


def any_joined(tensors: Iterable[str]) -> bool:
    """Return whether experts are one parameter by the names of tensors in a file."""
    return any(".mlp.experts.lora_" in name for name in tensors)


def _fed_forward(module: str) -> bool:
    """Return whether it is a linear layer of a feed-forward that is not an expert's."""
    last = module.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")
    return last and ".experts." not in module


def _rows_of(pair: Adapter, part: WeightPart) -> WeightPart | None:
    """Return the part of an adapter's B among rows of a whole weight; None if it has no rows of
    these, which are those of one linear layer.
    """
    if pair.of == 1:
        return part
    dim = 1 if pair.alternates else 0
    unit = pair.of // part.ours.shape[dim]  # heads have their width
    first, stop = pair.first // unit, pair.stop // unit
    if not first <= part.ours.start[dim] < part.ours.stop[dim] <= stop:
        return None

    def own(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    shape, start, ends = part.ours.shape, part.ours.start, part.ours.stop
    box = Block(
        own(shape, stop - first), own(start, start[dim] - first), own(ends, ends[dim] - first)
    )
    return replace(part, ours=box)


def _stack(part: WeightPart, nth: int, count: int) -> WeightPart:
    """Return the part of a matrix that is the n-th of several below each other."""
    if count == 1:
        return part
    rows, columns = part.shape
    ours = Block.whole(1, rows, columns)
    theirs = Block.whole(count, rows, columns).cut(0, count, nth)
    return WeightPart(part.name, (count * rows, columns), ours, theirs, (0, 1, 2))


def _beside(part: WeightPart, nth: int, count: int) -> WeightPart:
    """Return the part of a matrix whose columns are the n-th of several beside each other."""
    if count == 1:
        return part

    def apart(block: Block, sizes: int, at: int) -> Block:
        shape, start, stop = (
            (*values[:-1], more, values[-1])
            for values, more in zip(
                (block.shape, block.start, block.stop), (sizes, at, at + 1), strict=True
            )
        )
        return Block(shape, start, stop)

    *rows, columns = part.shape
    dims = len(part.order)
    return WeightPart(
        part.name,
        (*rows, count * columns),
        apart(part.ours, 1, 0),
        apart(part.theirs, count, nth),
        (*part.order[:-1], dims - 1, dims),
    )


def _stacked_a(tensor: str, own: NamedWeight, nth: int, count: int) -> WeightPart:
    """Return the tensor of all experts' A: E × count × r × inputs."""
    experts, inputs, rank = own.weight.shape
    ours = Block.whole(experts, inputs, 1, rank)
    theirs = Block.whole(experts, count, rank, inputs).cut(1, count, nth)
    return WeightPart(tensor, theirs.shape, ours, theirs, (0, 3, 1, 2))


def _stacked_b(
    tensor: str, own: NamedWeight, pair: Adapter, nth: int, count: int, *, alternates: bool
) -> WeightPart:
    """Return the tensor of all experts' B: outputs × count × r × E. Outputs are those of gate, then
    those of up; `alternates`: one of each in turn.
    """
    experts, rank, *both, outputs = own.weight.shape
    ours = Block.whole(experts, 1, rank, *(both or [1]), outputs)
    if alternates:
        theirs = Block.whole(outputs, *(both or [1]), count, rank, experts)
        order = (4, 2, 3, 1, 0)
    else:
        gates = pair.of * ours.shape[3]
        theirs = Block.whole(gates, outputs, count, rank, experts).cut(0, pair.of, pair.first)
        order = (4, 2, 3, 0, 1)
    return WeightPart(tensor, theirs.shape, ours, theirs.cut(2, count, nth), order)


def in_file(part: WeightPart) -> tuple[int, ...]:
    """Return the shape of a part's tensor in the file, where `peft` joins dimensions."""
    if len(part.shape) == 2:
        return part.shape
    outer = len(part.shape) - 1 if ".lora_A." in part.name else 2
    return prod(part.shape[:outer]), prod(part.shape[outer:])


def named_in_file(tensors: Iterable[str]) -> dict[str, str]:
    """Return the name in files of every tensor.

    `peft` wraps a module with two adapted parameters twice: gate_up_proj first, then down_proj.
    """
    names = {name: name for name in tensors}
    found = {name: match for name in names if (match := EXPERTS.fullmatch(module_of(name)))}
    wrapped = {match[1] for match in found.values() if match[2] == "down_proj"}
    for name, match in found.items():
        inner = match[2] == "gate_up_proj" and match[1] in wrapped
        module = f"{tables.ADAPTED}{match[1]}{WRAPPED if inner else ''}"
        names[name] = f"{module}.lora_{name.rpartition('.lora_')[2]}"
    return names
