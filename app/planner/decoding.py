"""Memory of text generation on a rank: weights, and the key/value cache of all layers, in bytes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from app.config import ModelConfig
from app.errors import ConfigError
from app.plan.formatting import byte_count, count_of
from app.plan.memory.overheads import CUDA_CONTEXT, WORKSPACES
from app.plan.parts.trace import BYTES
from app.plan.sharding.parameters import chunk_parameters
from app.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class DecodingSizes:
    """Sizes of a generation that determine its key/value cache."""

    sequences: int  # generated together
    prompt: int  # tokens of the longest prompt
    new: int  # new tokens at most per sequence

    @property
    def tokens(self) -> int:
        """Most tokens of a sequence, prompt included."""
        return self.prompt + self.new


@dataclass(frozen=True, slots=True)
class DecodingMemory:
    """Bytes on each rank of one pipeline rank."""

    weights: int
    caches: tuple[int, ...]  # key/value cache of each layer, all sequences

    @property
    def keys_values(self) -> int:
        """Key/value cache of all layers."""
        return sum(self.caches)


def decoding_memory(plan: Plan, pp_rank: int, sequences: int, *, tokens: int) -> DecodingMemory:
    """Return the memory of a rank that generates `sequences` of at most `tokens`.

    Context-parallel ranks and replicas each have whole sequences.
    """
    model, layout = plan.run.model, plan.layout
    size = BYTES[plan.run.precision.params]
    stages = plan.stages.stages[pp_rank]
    numel = sum(
        parameter.numel for stage in stages for parameter in chunk_parameters(model, stage, layout)
    )
    places = padded(tokens, layout.tp)
    specs = [model.layer_specs[layer].attention for stage in stages for layer in stage.layers]
    caches = (sequences * spec.cached_bytes(places, layout.tp, size) for spec in specs)
    return DecodingMemory(numel * size, tuple(caches))


def padded(count: int, ranks: int) -> int:
    """Return `count` rounded up to a multiple of `ranks`."""
    return -(-count // ranks) * ranks


def texts_that_fit(plan: Plan, tokens: int, have: int, *, gpu: bool) -> int:
    """Return how many sequences of `tokens` a replica can generate together.

    `have`: bytes of a GPU, or of a host without one. The activations of computing prompts are not
    counted.
    """
    fixed = fixed_bytes(gpu)
    ones = [decoding_memory(plan, rank, 1, tokens=tokens) for rank in range(plan.layout.pp)]
    return min(max(0, have - fixed - each.weights) // max(1, each.keys_values) for each in ones)


def fixed_bytes(gpu: bool) -> int:
    """Return what a GPU holds besides weights and cache."""
    return CUDA_CONTEXT + WORKSPACES if gpu else 0


def check_decoding_length(model: ModelConfig, sizes: DecodingSizes) -> None:
    """Raise ConfigError if texts become so long that rotary positions change, which cached keys
    would not follow.
    """
    most = model.rope.original_length
    if most is None or sizes.tokens <= most:
        return
    name = "longrope" if model.longrope is not None else "dynamic_rope"
    rule = (
        f"a text of {sizes.tokens:,} tokens, with its prompt, has other rotary positions than one "
        f"of model.{name}.original_length={most}, and keys of its first tokens are cached"
    )
    near = most - sizes.prompt
    raise ConfigError("max_new_tokens", sizes.new, rule, nearest=near if near > 0 else None)


def check_decoding_memory(plan: Plan, sizes: DecodingSizes, have: int, *, gpu: bool) -> None:
    """Raise ConfigError if weights and key/value cache exceed `have`, the bytes of a GPU or a host.

    The activations of computing prompts come on top.
    """
    ranks = range(plan.layout.pp)
    needed = [decoding_memory(plan, rank, sizes.sequences, tokens=sizes.tokens) for rank in ranks]
    busiest = max(needed, key=lambda each: each.weights + each.keys_values)
    if busiest.weights + busiest.keys_values + fixed_bytes(gpu) <= have:
        return
    where = "a GPU" if gpu else "this host"
    rule = (
        f"keys and values of {count_of(sizes.sequences, 'text')} of {sizes.tokens:,} tokens take "
        f"{byte_count(busiest.keys_values)} per rank beside {byte_count(busiest.weights)} of "
        f"weights, and {where} has {byte_count(have)}"
    )
    tp = plan.layout.tp  # divides the tokens of a text
    if not texts_that_fit(plan, tp, have, gpu=gpu):
        advice = "parallel.pp spreads it over more GPUs" if gpu else None
        raise ConfigError("batch", sizes.sequences, rule, advice=advice)
    if sizes.sequences > 1:
        fewer = texts_that_fit(plan, sizes.tokens, have, gpu=gpu)
        raise ConfigError("batch", sizes.sequences, rule, nearest=max(1, fewer))
    shorter = range(tp, padded(sizes.tokens, tp), tp)
    most = bisect_left(
        shorter, True, key=lambda tokens: not texts_that_fit(plan, tokens, have, gpu=gpu)
    )
    fewer = tp * most - sizes.prompt
    raise ConfigError("max_new_tokens", sizes.new, rule, nearest=fewer if fewer > 0 else None)
