"""Names of activations in config.json."""

from __future__ import annotations

from app.choices import ActivationKind
from app.hf.their_config import TheirConfig

WRITTEN = {
    ActivationKind.silu: "silu",
    ActivationKind.gelu_tanh: "gelu_pytorch_tanh",
    ActivationKind.gelu: "gelu",
    ActivationKind.relu2: "relu2",
}
NAMES = {
    **{name: kind for kind, name in WRITTEN.items()},
    "swish": ActivationKind.silu,
    "gelu_new": ActivationKind.gelu_tanh,  # the same approximation, spelt out
    "gelu_fast": ActivationKind.gelu_tanh,
}


def activation(config: TheirConfig, usual: str) -> ActivationKind:
    """Return the activation that hidden_act names; `usual`: where it is missing."""
    name = config.value("hidden_act") if "hidden_act" in config.values else usual
    kind = NAMES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise config.unsupported("hidden_act")
    return kind
