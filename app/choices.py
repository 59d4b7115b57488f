"""Every closed set of choices in the configuration. Names and values are what the user types."""

from __future__ import annotations

from enum import Enum


class Score(Enum):
    """What turns router logits into scores."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class DispatcherKind(Enum):
    """How tokens reach their experts."""

    auto = "auto"  # local when ep = 1, otherwise all_to_all
    local = "local"  # every expert on this rank
    all_to_all = "all_to_all"  # dropless exchange of uneven parts among the expert-parallel ranks


class ScheduleName(Enum):
    """Order of forwards and backwards within a step."""

    none = "none"  # F0 B0 F1 B1 …: no pipeline


class GraphImpl(Enum):
    """Which CUDA graphs are captured."""

    none = "none"


class Dtype(Enum):
    """Element type of parameters and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Decay(Enum):
    """Shape of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    inverse_square_root = "inverse_square_root"
    wsd = "wsd"  # warm-up, stable, decay


class WsdDecay(Enum):
    """Shape of the last part of a warm-up, stable, decay schedule."""

    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"
    minus_sqrt = "minus_sqrt"


class Ramp(Enum):
    """How weight decay moves from its first to its last value."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Source(Enum):
    """Where documents come from."""

    stdlib = "stdlib"  # the text files of the running interpreter's standard library
    text = "text"  # one document per file
    jsonl = "jsonl"  # one JSON object per line
    parquet = "parquet"
    hub = "hub"  # a dataset by name, or a local folder in the same format


class Normalize(Enum):
    """What the summed token losses are divided by."""

    token = "token"  # valid tokens of the whole step: all microbatches and data-parallel ranks
    microbatch = "microbatch"  # each microbatch by its own valid tokens, then the mean over microbatches


class Device(Enum):
    """Where the run computes."""

    auto = "auto"  # a GPU when there is one
    cpu = "cpu"
    cuda = "cuda"


class WandbMode(Enum):
    """Where the Weights & Biases run goes."""

    offline = "offline"  # written to the run folder; `wandb sync` uploads it later
    online = "online"  # needs `wandb login` first
