"""Every closed set of choices in the configuration. Names and values are what the user types."""

from __future__ import annotations

from enum import Enum


class Score(Enum):
    """What turns router logits into scores."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class CloneAlgorithm(Enum):
    """Which experts' tokens go to which rank's spare slots (`app.moe.echo`)."""

    one_shot_greedy = "one_shot_greedy"
    approx_bin_packing = "approx_bin_packing"
    # tries many target loads and ways to reach them, and takes the plan of the lowest cost
    target_search = "target_search"
    exact = target_search  # the name before; accepted in overrides and saved configurations


class DispatcherKind(Enum):
    """How tokens reach their experts."""

    auto = "auto"  # local when ep = 1, otherwise all_to_all
    local = "local"  # every expert on this rank
    all_to_all = "all_to_all"  # exchange of uneven parts among the expert-parallel ranks
    # every expert-parallel rank sees all tokens and takes those of its experts
    all_gather = "all_gather"
    # a token goes once to each rank that it needs; no size depends on what routers choose
    static = "static"


class StaticTransport(Enum):
    """What moves tokens between ranks for `DispatcherKind.static`."""

    auto = "auto"  # peer between GPUs of one node that have Triton, otherwise collective
    peer = "peer"  # reads and writes of each other's memory, over NVLink
    collective = "collective"  # collectives of equal parts, on any device


class StaticCapacity(Enum):
    """Rows that a rank's experts have memory for, with `DispatcherKind.static`."""

    worst = "worst"  # all that tokens could ask for
    factor = "factor"  # so many times the mean; a step that needs more is taken again, eagerly


class StaticOverflow(Enum):
    """What follows two steps in a row that needed more rows than `StaticCapacity.factor` has."""

    # memory for more, and graphs are captured anew; if there is none, such steps are taken again
    grow = "grow"
    stop = "stop"  # the run ends


class DropPolicy(Enum):
    """Which of an expert's tokens stay when they are more than its capacity."""

    probs = "probs"  # those with the highest probabilities
    position = "position"  # the first ones


class Balance(Enum):
    """What the load-balancing loss evens the experts' load over."""

    microbatch = "microbatch"
    sequence = "sequence"  # every sequence by itself
    global_batch = "global_batch"  # the microbatches of all data-parallel ranks so far in the step


class ScheduleName(Enum):
    """Order of forwards and backwards within a step; docs/parallelism.md shows each."""

    # none without pipeline ranks, 1f1b with one stage per rank, interleaved with several
    auto = "auto"
    none = "none"  # F0 B0 F1 B1 …: no pipeline
    gpipe = "gpipe"  # all forwards, then all backwards
    # one forward and one backward in turn; no Python name, but what the user types
    locals()["1f1b"] = "1f1b"
    interleaved = "interleaved"  # the same over several stages per rank
    # 1f1b with gradients of weights computed where the pipeline would idle
    zero_bubble_h1 = "zero_bubble_h1"
    zero_bubble_v = "zero_bubble_v"  # the same over two stages per rank that lie in a V


class CpComm(Enum):
    """What context-parallel ranks exchange for attention."""

    all_gather = "all_gather"  # keys and values of the whole sequence to every rank
    # queries, keys and values, so that every rank has whole sequences of a part of the heads
    all_to_all = "all_to_all"


class GraphImpl(Enum):
    """Who captures CUDA graphs, and how much of a step one holds."""

    none = "none"
    local = "local"  # parts of layers, captured by this project
    transformer_engine = "transformer_engine"  # parts of layers, captured by Transformer Engine
    full_iteration = "full_iteration"  # forward and backward of a whole step


class GraphScope(Enum):
    """Parts of a layer that a partial graph holds."""

    attn = "attn"  # attention
    mlp = "mlp"  # feed-forward of dense layers
    moe_router = "moe_router"  # norm, shared expert and router of MoE layers
    moe_preprocess = "moe_preprocess"  # what the exchange of tokens needs to know
    moe = "moe"  # everything in an MoE layer behind attention


class GraphKey(Enum):
    """What owns a set of partial graphs."""

    microbatch = "microbatch"  # every microbatch of a step
    slot = "slot"  # every place that a microbatch in flight may have


class Recompute(Enum):
    """Parts of a layer whose values are computed again in backward instead of being kept."""

    # heads, rotary positions and softmax attention, from the projected queries, keys and values
    attn_core = "attn_core"
    norm = "norm"  # outputs of both norms
    mlp_act = "mlp_act"  # activation of dense feed-forwards
    experts_act = "experts_act"  # activation of routed experts
    shared = "shared"  # the shared expert
    moe = "moe"  # everything in an MoE layer behind attention


class Dtype(Enum):
    """Element type of tensors."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Fp8Recipe(Enum):
    """What a matrix in FP8 is scaled by, so that its entries fit."""

    current = "current"  # its own largest entry
    delayed = "delayed"  # the largest entry that it has had in the last steps
    # the largest entry of every 128 values, of weights of every block of 128 × 128
    block = "block"


class Fp8Part(Enum):
    """Products in FP8."""

    linear = "linear"  # projections of attention, dense feed-forwards, shared experts
    head = "head"  # hidden states to logits
    experts = "experts"  # routed experts, by rows with a scale each


class LinearBackendKind(Enum):
    """What computes the products of linear layers in FP8."""

    # on a GPU transformer_engine, and torch's grouped product on tensor cores; torch on a CPU
    auto = "auto"
    torch = "torch"  # entries rounded to FP8, products in float32: the reference, slow
    transformer_engine = "transformer_engine"  # tensor cores, on GPUs like Hopper and newer


class AttentionBackendKind(Enum):
    """What computes softmax attention."""

    torch = "torch"
    transformer_engine = "transformer_engine"  # cuDNN's kernels, also those that torch lacks


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


class BadFile(Enum):
    """What follows a file of a corpus that cannot be read or is not what it should be."""

    stop = "stop"  # the run ends with a line that names it
    skip = "skip"  # nothing of it is read, and a line at the start says so


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
    # each microbatch by its own valid tokens, then the mean over microbatches
    microbatch = "microbatch"


class BadStep(Enum):
    """What follows a step whose loss or gradient norm is not finite, besides a skipped update."""

    skip = "skip"  # go on with the next batches
    stop = "stop"  # end the run
    rollback = "rollback"  # go back to the newest checkpoint, and leave out the data since then


class Device(Enum):
    """Where the run computes."""

    auto = "auto"  # a GPU when there is one
    cpu = "cpu"
    cuda = "cuda"


class WandbMode(Enum):
    """Where the Weights & Biases run goes."""

    offline = "offline"  # written to the run folder; `wandb sync` uploads it later
    online = "online"  # needs `wandb login` first
