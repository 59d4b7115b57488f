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

from app.hf import config_keys
from app.hf.families import FAMILIES
from app.hf.file_names import CONFIG_JSON
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

"""
ROTARY = """\
## Rotary positions

The section is `rope_parameters` or `rope_scaling`; where both are filled, the second counts. The
type is `rope_type` or `type`. A key that the type does not take is refused.

| type | keys |
|---|---|
| `default` | `rope_theta`, `partial_rotary_factor` (has to be 1) |
| `llama3` | the same, {llama3} |
| `yarn` | the same, {yarn}, `truncate`; `attention_factor` has to be missing or null |

`original_max_position_embeddings` outside of the section counts before the one inside; without
both, `max_position_embeddings` takes its place. Other types are refused.

## Weights in FP8

`quantization_config` is read where `quant_method` is `fp8`: `weight_block_size`. {fp8}
No effect: {free}.
"""


@cache
def keys_read(model_type: str) -> frozenset[str]:
    """Keys that a family's reader asks for, whatever their values; not those that only have to be
    neutral.
    """
    values = config_class(model_type)().to_dict()
    sizes = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    known = {name: value for name, value in sizes.items() if name in values}
    rotary = {"rope_theta": 1e4, "rope_type": "default"}
    with tempfile.TemporaryDirectory() as folder:
        written = json.dumps({**values, **known, "rope_parameters": rotary}, default=str)
        (Path(folder) / CONFIG_JSON).write_text(written)
        model = TheirModel.read(Path(folder), "model.init_from")
    again = dataclasses.replace(model.config, asked=set())
    model.family.read(again)
    return frozenset(again.asked | (model.config.asked - config_keys.NEUTRAL.keys()))


def config_class(model_type: str) -> Any:
    """The class of `transformers`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


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
    begin = BEGIN.format(version=__version__)
    return begin + "\n".join(("| key | import |", "|---|---|", *rows)) + "\n\n" + _rotary()


def _cell(rules: Mapping[str, list[str]]) -> str:
    if len(rules) == 1:
        ((said, families),) = rules.items()
        return said if len(families) == len(TYPES) else f"{said} ({', '.join(families)})"
    return "; ".join(f"{said} ({', '.join(families)})" for said, families in rules.items())


def _rotary() -> str:
    from app.hf.config_json import LLAMA3, YARN

    listed = {name: ", ".join(f"`{key}`" for key in keys.values())
              for name, keys in (("llama3", LLAMA3), ("yarn", YARN))}  # fmt: skip
    fp8 = "; ".join(f"`{key}` {told(values)}" for key, values in config_keys.FP8_NEUTRAL.items())
    free = ", ".join(f"`{key}`" for key in sorted(config_keys.FP8_WITHOUT_EFFECT))
    return ROTARY.format(**listed, fp8=f"{fp8}.", free=free)


if __name__ == "__main__":
    PAGE.write_text(page())
