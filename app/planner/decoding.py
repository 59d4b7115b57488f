"""Memory of text generation on a rank: weights, and the key/value cache of all layers, in bytes."""

from __future__ import annotations

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
    layer: int  # key/value cache of one layer, all sequences
    layers: int

    @property
    def keys_values(self) -> int:
        """Key/value cache of all layers."""
        return self.layer * self.layers


def remembered_numel(model: ModelConfig, tp: int) -> int:
    """Return the cached elements per token and layer on a rank.

    These are keys and values of its heads, or with MLA the latent and the rotary key, which every
    tensor-parallel rank has.
    """
    if model.mla is not None:
        return model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
    return 2 * (model.num_kv_heads // tp) * model.head_width


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
    layer = sequences * places * remembered_numel(model, layout.tp) * size
    return DecodingMemory(numel * size, layer, sum(len(stage.layers) for stage in stages))


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
    # of as many tokens as there are tensor-parallel ranks, which divide them
    units = texts_that_fit(plan, plan.layout.tp, have, gpu=gpu)
    if not units:
        advice = "parallel.pp spreads it over more GPUs" if gpu else None
        raise ConfigError("batch", sizes.sequences, rule, advice=advice)
    if sizes.sequences > 1:
        fewer = texts_that_fit(plan, sizes.tokens, have, gpu=gpu)
        raise ConfigError("batch", sizes.sequences, rule, nearest=max(1, fewer))
    fewer = units * plan.layout.tp - sizes.prompt
    raise ConfigError("max_new_tokens", sizes.new, rule, nearest=fewer if fewer > 0 else None)
