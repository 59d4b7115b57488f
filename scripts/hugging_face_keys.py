"""Write docs/hugging-face-keys.md: what import does with each key of config.json.

    python scripts/hugging_face_keys.py

Keys are those of the configuration classes of the installed `transformers`, and what
`app.hf.config_keys` adds.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from app.config import ModelConfig
from app.hf import config_keys
from app.hf.file_names import CONFIG_JSON
from app.hf.supported import FAMILIES
from app.hf.their_model import TheirModel

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hugging-face-keys.md"
READ = "read"
TYPES = tuple(family.model_type for family in FAMILIES)
# What families share, as `transformers` reads it from any configuration.
SHARED = ("rope_theta", "rope_scaling", "original_max_position_embeddings", "quantization_config")
BEGIN = """\
# Keys of config.json

What import does with every key that `transformers` {version} knows in the supported families:

- *read*: it becomes a key of `model.*`, or says how the files are read.
- *has to be* a value: any other is refused. A key that is missing or null passes, except that
  `is_causal` and `rope_interleave` may not be null.
- *no effect*: no value changes logits, for the reason that is given.

Import names any other key in one line and leaves it out, as `transformers` does. It is refused
together with `auto_map`: the code that this names could use it, and is not run.

`python scripts/hugging_face_keys.py` writes this page; tests compare it with the installed version.

{families}## All keys

"""
MODELS = {
    "llama": "Llama 2, 3, 3.1, 3.2",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "smollm3": "SmolLM3",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "qwen3_moe": "Qwen3 with experts",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2 with experts",
    "seed_oss": "Seed-OSS",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm4_moe": "GLM-4.5, GLM-4.5-Air, GLM-4.6",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, dense: the text of `qwen3_5` too",
    "qwen3_5_moe_text": "Qwen3.5 with experts: the text of `qwen3_5_moe` too",
    "minimax_m2": "MiniMax-M2, M2.1, M2.5",
    "ernie4_5": "ERNIE 4.5, dense",
    "ernie4_5_moe": "ERNIE 4.5 with experts",
    "kimi_k2": "Kimi-K2",
    "starcoder2": "StarCoder2",
    "nemotron": "Nemotron, Minitron",
    "gpt_neox": "GPT-NeoX, Pythia",
    "phi3": "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
    "granite": "Granite 3 (IBM)",
    "granitemoe": "Granite 3 with experts",
    "deepseek_v2": "DeepSeek-V2, V2-Lite",
    "deepseek_v3": "DeepSeek-V3, R1",
}
BY_LAYER = "windows by layer"
# column of the table of families: keys of config.json, or of our configuration, that say so
COLUMNS: Mapping[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "experts": (frozenset(("num_experts_per_tok", "moe_k")), ()),
    "shared expert": (
        frozenset(
            (
                "n_shared_experts",
                "shared_expert_intermediate_size",
                "moe_num_shared_experts",
            )
        ),
        (),
    ),
    "dense layers anywhere": (frozenset(("mlp_only_layers", "mlp_layer_types")), ()),
    "latent attention": (frozenset(("kv_lora_rank",)), ()),
    "linear attention": (frozenset(("linear_num_key_heads",)), ()),
    "windows": (frozenset(("sliding_window",)), ()),
    BY_LAYER: (frozenset(), ()),
    "biases of attention": (frozenset(("qkv_bias", "attention_bias", "use_bias")), ("qkv_bias",)),
    "biases of feed-forwards": (frozenset(("mlp_bias", "use_bias")), ()),
    "norms of queries and keys": (frozenset(("use_qk_norm",)), ("qk_norm",)),
    "layers without positions": (frozenset(("no_rope_layers",)), ()),
    "positions of a part of heads": (frozenset(("partial_rotary_factor",)), ()),
}
# of the keys that have to be neutral, those of variants that published models have
SPOKEN = frozenset((
    "hidden_act", "attention_bias", "attention_out_bias", "mlp_bias", "clip_qkv",
    "sliding_window", "use_sliding_window",
))  # fmt: skip
FAMILIES_HEAD = """\
## Families

A model is exported as the first of these types that computes the same, in most cases its own.

"""
REFUSED_HEAD = """

Scaled rotary positions (`llama3`, `yarn`, `linear`, `dynamic`, `longrope`) are read in all
families. The last two depend on the length of a sequence: training takes `train.seq_len`, and
generation is refused where a text would become longer than the original length. Weights quantised
by AWQ, GPTQ or bitsandbytes are refused.

"""
ROTARY = """\
## Rotary positions

The section is `rope_parameters` or `rope_scaling`; where both are filled, the second counts. The
type is `rope_type` or `type`. A key that the type does not take is refused.

| type | keys |
|---|---|
| `default` | `rope_theta`, `partial_rotary_factor` (has to be 1 unless the family has it) |
| `llama3` | the same, {llama3} |
| `yarn` | the same, {yarn}, `attention_factor`, `truncate` (not null) |
| `linear`, `dynamic` | the same as `default`, `factor` |
| `longrope` | the same as `linear`, {longrope}, `attention_factor` |

`original_max_position_embeddings` outside of the section counts before the one inside; without
both, `max_position_embeddings` takes its place. For `dynamic` only the last counts. Other types are
refused.

## Quantised weights

They are dequantised as they are read; a conversion exports them in bf16. `quant_method` of
`quantization_config` is one of:

- `fp8`: a scale per block of `weight_block_size`, per tensor where that is null; where it is
  missing, the shapes of scales tell. {fp8}
- `compressed-tensors`: FP8 in {formats}, with a scale per tensor, row or
  block as `config_groups` says. {compressed}
- `mxfp4`: experts of GPT-OSS.

Scales of activations, keys and values are left out and named. No effect: {free}.
"""


@cache
def keys_read(model_type: str) -> frozenset[str]:
    """Keys that a family's reader asks for, whatever their values; not those that only have to be
    neutral.
    """
    model = _with_defaults(model_type)
    again = dataclasses.replace(model.config, asked=set())
    model.family.read(again)
    return frozenset(again.asked | (model.config.asked - config_keys.NEUTRAL.keys()))


def _usual(model_type: str) -> ModelConfig:
    """The model that the class of `transformers` describes without arguments."""
    return _with_defaults(model_type).model


@cache
def _with_defaults(model_type: str) -> TheirModel:
    values = config_class(model_type)().to_dict()
    sizes = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    known = {name: value for name, value in sizes.items() if name in values}
    rotary: dict[str, Any] = {"rope_theta": 1e4, "rope_type": "default"}
    if "partial_rotary_factor" in values["rope_parameters"]:
        rotary["partial_rotary_factor"] = 1.0  # heads may be too narrow for less
    if "sliding_attention" in values["rope_parameters"]:
        rotary = {"full_attention": rotary, "sliding_attention": rotary}
    with tempfile.TemporaryDirectory() as folder:
        values["model_type"] = model_type
        written = json.dumps({**values, **known, "rope_parameters": rotary}, default=str)
        (Path(folder) / CONFIG_JSON).write_text(written)
        return TheirModel.read(Path(folder), "model.init_from")


def config_class(model_type: str) -> Any:
    """The class of `transformers`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    (same,) = (family.written_as for family in FAMILIES if family.model_type == model_type)
    return CONFIG_MAPPING[same]


def keys_known(model_type: str) -> set[str]:
    """Keys that `transformers` takes from a config.json of this type."""
    from transformers import GenerationConfig

    kind = config_class(model_type)
    attributes = {
        name
        for name, value in inspect.getmembers_static(kind)
        if not name.startswith("__") and not callable(value)
        and not isinstance(value, classmethod | staticmethod)
    }  # fmt: skip
    names = {field.name for field in dataclasses.fields(kind)}
    names |= attributes | kind().to_dict().keys() | set(kind.attribute_map) | set(SHARED)
    names |= GenerationConfig._get_default_generation_params().keys()
    return {name for name in names if not name.startswith("_abc_")}


def rule(model_type: str, key: str) -> str | None:
    """What import does with a key, in words; None: it names the key, and leaves it out."""
    free = config_keys.WITHOUT_EFFECT_IN.get(model_type, {})
    if key in keys_read(model_type) or key in ("model_type", *SHARED):
        return READ
    if key in free or key in config_keys.WITHOUT_EFFECT:
        return f"no effect: {free.get(key) or config_keys.WITHOUT_EFFECT[key]}"
    if key in config_keys.NOT_APPLIED:
        return "no effect on logits: noise of training, which is not applied; said where not 0"
    if key not in config_keys.NEUTRAL:
        return None
    return told(config_keys.NEUTRAL[key])


def told(values: tuple[Any, ...]) -> str:
    """The neutral values of a key, in words."""
    listed = " or ".join(f"`{json.dumps(value)}`" for value in values)
    return f"has to be {listed}" if values else "has to be missing or null"


def page() -> str:
    """The contents of the page."""
    from transformers import __version__

    table: dict[str, dict[str, list[str]]] = {}
    for model_type in TYPES:
        for key in keys_known(model_type) | config_keys.NEUTRAL.keys():
            if said := rule(model_type, key):
                table.setdefault(key, {}).setdefault(said, []).append(model_type)
    rows = [f"| `{key}` | {_cell(rules)} |" for key, rules in sorted(table.items())]
    begin = BEGIN.format(version=__version__, families=families())
    return begin + "\n".join(("| key | import |", "|---|---|", *rows)) + "\n\n" + _rotary()


def _has(model_type: str, column: str) -> bool:
    """True if models of a type may have what a column of the table of families names."""
    read = keys_read(model_type)
    keys, ours = COLUMNS[column]
    if column == BY_LAYER:  # others read layer_types to refuse what they lack
        (family,) = (each for each in FAMILIES if each.model_type == model_type)
        return "layer_types" in family.layers and "sliding_window" in read
    return bool(read & keys) or any(getattr(_usual(model_type), name) for name in ours)


def families() -> str:
    """The table of families: what their models may have, and the type that they are exported as."""
    head = ("type", "models", *COLUMNS, "exported as")
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for family in FAMILIES:
        kind = family.model_type
        ticks = ("✓" if _has(kind, column) else "" for column in COLUMNS)
        cells = (f"`{kind}`", MODELS.get(kind, kind), *ticks, f"`{family.written_as or kind}`")
        rows.append("| " + " | ".join(cells) + " |")
    refused = {
        kind: sorted(
            key
            for key in keys_known(kind) & config_keys.NEUTRAL.keys() & SPOKEN
            if rule(kind, key) != READ
        )
        for kind in TYPES
    }
    lines = [
        f"| `{kind}` | {', '.join(f'`{key}`' for key in keys)} |" for kind, keys in refused.items()
    ]
    variants = ["| type | refused unless neutral |", "|---|---|", *lines]
    return FAMILIES_HEAD + "\n".join(rows) + REFUSED_HEAD + "\n".join(variants) + "\n\n"


def _cell(rules: Mapping[str, list[str]]) -> str:
    if len(rules) == 1:
        ((said, families),) = rules.items()
        return said if len(families) == len(TYPES) else f"{said} ({', '.join(families)})"
    return "; ".join(f"{said} ({', '.join(families)})" for said, families in rules.items())


def _rotary() -> str:
    from app.hf.rotary import LLAMA3, LONGROPE, YARN

    kinds = {"llama3": LLAMA3, "longrope": LONGROPE, "yarn": YARN}
    listed = {name: ", ".join(f"`{key}`" for key in keys.values()) for name, keys in kinds.items()}
    groups = dict(config_keys.COMPRESSED_NEUTRAL)
    formats = " and ".join(f"`{name}`" for name in groups.pop("format"))
    fp8, compressed = (
        "; ".join(f"`{key}` {told(values)}" for key, values in table.items()) + "."
        for table in (config_keys.FP8_NEUTRAL, groups)
    )
    free = ", ".join(f"`{key}`" for key in sorted(config_keys.QUANTISED_WITHOUT_EFFECT))
    return ROTARY.format(**listed, formats=formats, fp8=fp8, compressed=compressed, free=free)


if __name__ == "__main__":
    PAGE.write_text(page())
