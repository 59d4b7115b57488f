"""Every closed set of choices in the configuration. Names and values are what the user types."""

from __future__ import annotations

from enum import Enum


class LayerType(Enum):
    """Tokens that the attention of a layer sees, by the names of `transformers`."""

    full_attention = "full_attention"  # all tokens before a query
    sliding_attention = "sliding_attention"  # the last `model.sliding_window` of them
    # all, summed up in a state of fixed size (`model.linear_attention`)
    linear_attention = "linear_attention"


class BlockKind(Enum):
    """Place of norms and residual connections in a decoder layer."""

    norm_before = "norm_before"  # x + attention(norm(x)), then the same with the feed-forward
    norm_after = "norm_after"  # x + norm(attention(x)) (OLMo-2, EXAONE-4)
    norm_around = "norm_around"  # x + norm(attention(norm(x))) (Gemma 2 and 3)
    # x + attention(norm(x)) + feed-forward(norm(x)), with one norm (Cohere2)
    parallel = "parallel"
    # the same with a norm for each (GPT-NeoX)
    parallel_norms = "parallel_norms"


class BaseKind(Enum):
    """Type in which the frozen linear layers beside adapters are held."""

    fp8 = "fp8"  # e4m3, an fp32 scale per 128 values
    nf4 = "nf4"  # 4 bits, an fp32 scale per 64 values (QLoRA, arXiv 2305.14314)


class NormKind(Enum):
    """Norms over hidden states."""

    rms = "rms"  # RMSNorm
    rms_plus_one = "rms_plus_one"  # RMSNorm scaled by 1 + its weight (Gemma), also of heads
    layer = "layer"  # LayerNorm without a bias (Cohere2)
    layer_bias = "layer_bias"  # LayerNorm with a bias
    # the same scaled by 1 + its weight (Nemotron)
    layer_plus_one = "layer_plus_one"


class ActivationKind(Enum):
    """Function of dense feed-forwards: of the gate, or without one of the up projection."""

    silu = "silu"  # with a gate SwiGLU
    gelu_tanh = "gelu_tanh"  # tanh approximation of GELU; with a gate GeGLU
    gelu = "gelu"  # without a gate only
    relu2 = "relu2"  # square of ReLU (Nemotron); without a gate only


class Score(Enum):
    """Function that turns router logits into scores."""

    softmax = "softmax"
    sigmoid = "sigmoid"
    # softmax over all experts, with a bias for the choice; those of the chosen ones are divided by
    # their sum (ERNIE 4.5)
    softmax_bias = "softmax_bias"


class CloneAlgorithm(Enum):
    """Algorithm that assigns hot experts' tokens to spare slots of other ranks (`app.moe.echo`)."""

    one_shot_greedy = "one_shot_greedy"
    approx_bin_packing = "approx_bin_packing"
    # tries many target loads and ways to reach them, and takes the plan of the lowest cost
    target_search = "target_search"


class DispatcherKind(Enum):
    """Transport of tokens to their experts and back."""

    auto = "auto"  # local when ep = 1, otherwise all_to_all
    local = "local"  # every expert on this rank
    all_to_all = "all_to_all"  # uneven all-to-all over the expert-parallel ranks
    # all-gather of tokens; every expert-parallel rank keeps the tokens of its experts
    all_gather = "all_gather"
    # one copy of a token per destination rank; no size depends on the routing, so no host sync
    static = "static"


class StaticTransport(Enum):
    """Transport of tokens between ranks for `DispatcherKind.static`."""

    auto = "auto"  # peer on GPUs of one node that have Triton, otherwise collective
    peer = "peer"  # loads and stores to other GPUs' memory over NVLink
    collective = "collective"  # collectives of equal parts, on any device


class StaticCapacity(Enum):
    """Capacity for dispatched tokens per rank with `DispatcherKind.static`."""

    worst = "worst"  # the most that routing could ask for: never overflows
    factor = "factor"  # a multiple of the mean; a step that needs more is rerun eagerly


class StaticOverflow(Enum):
    """Reaction to two steps in a row that exceeded the capacity of `StaticCapacity.factor`."""

    # allocate a larger capacity and recapture; if memory is short, keep rerunning such steps
    grow = "grow"
    stop = "stop"  # end the run


class DropPolicy(Enum):
    """Rule that picks the tokens an expert keeps when they exceed its capacity."""

    probs = "probs"  # highest probabilities first
    position = "position"  # first tokens first


class Balance(Enum):
    """Set of tokens over which the load-balancing loss evens the experts' load."""

    microbatch = "microbatch"
    sequence = "sequence"  # each sequence by itself
    global_batch = "global_batch"  # the microbatches of all data-parallel ranks so far in the step


class OptimizerKind(Enum):
    """Optimizer of matrices of linear layers and experts; AdamW updates all other parameters."""

    adamw = "adamw"
    muon = "muon"  # momentum, orthogonalised matrix by matrix


class MomentDtype(Enum):
    """Element type of AdamW's moments."""

    fp32 = "fp32"
    bf16 = "bf16"


class MuonTp(Enum):
    """Matrix that Muon orthogonalises where tensor parallelism divides matrices."""

    gather = "gather"  # the whole one, on one of the ranks: exact
    blocks = "blocks"  # each rank's block as if it were a matrix: approximate, and sends nothing


class MuonDtype(Enum):
    """Element type of Muon's GEMMs, and of the matrices that it sends."""

    bf16 = "bf16"
    fp32 = "fp32"


class ScheduleName(Enum):
    """Order of forwards and backwards within a step; docs/parallelism.md shows each."""

    # none for one pipeline rank, 1f1b for one stage per rank, interleaved for several
    auto = "auto"
    none = "none"  # F0 B0 F1 B1 …: no pipeline
    gpipe = "gpipe"  # all forwards, then all backwards
    # alternating forwards and backwards; "1f1b" is no Python name, but what the user types
    locals()["1f1b"] = "1f1b"
    interleaved = "interleaved"  # 1f1b over several stages per rank
    # 1f1b with weight gradients computed in what would be bubbles
    zero_bubble_h1 = "zero_bubble_h1"
    zero_bubble_v = "zero_bubble_v"  # the same over two stages per rank laid out in a V


class CpComm(Enum):
    """Communication between context-parallel ranks in attention."""

    all_gather = "all_gather"  # all-gather of keys and values of the whole sequence
    # all-to-all of queries, keys and values: whole sequences for a part of the heads (Ulysses)
    all_to_all = "all_to_all"


class GraphImpl(Enum):
    """Implementation that captures CUDA graphs, and the extent of one graph."""

    none = "none"
    local = "local"  # parts of layers, captured by this project
    transformer_engine = "transformer_engine"  # parts of layers, captured by Transformer Engine
    full_iteration = "full_iteration"  # forward and backward of all microbatches of a step


class GraphScope(Enum):
    """Parts of a layer that a partial graph holds."""

    attn = "attn"  # attention
    mlp = "mlp"  # feed-forward of dense layers
    moe_router = "moe_router"  # norm, shared expert and router of MoE layers
    moe_preprocess = "moe_preprocess"  # counts, offsets and permutation that the dispatcher needs
    moe = "moe"  # the whole MoE layer after attention


class GraphKey(Enum):
    """Owner of a set of partial graphs."""

    microbatch = "microbatch"  # each microbatch of a step
    slot = "slot"  # each slot, that is each concurrent microbatch in flight


class Recompute(Enum):
    """Parts of a layer that are recomputed in backward instead of saved."""

    # head split, rotary embedding and softmax attention, from the projected q, k and v
    attn_core = "attn_core"
    norm = "norm"  # outputs of both norms
    mlp_act = "mlp_act"  # activation of dense feed-forwards
    experts_act = "experts_act"  # activation of routed experts
    shared = "shared"  # the shared expert
    moe = "moe"  # the whole MoE layer after attention


class Offload(Enum):
    """Parts of a layer that keep what backward needs in host memory."""

    layers = "layers"  # whole layers; with recompute.full their inputs
    attn = "attn"  # attention with its norm
    mlp = "mlp"  # dense feed-forwards with their norm
    moe = "moe"  # the whole MoE layer after attention


class Dtype(Enum):
    """Element type of tensors."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Fp8Recipe(Enum):
    """Scaling of matrices in FP8."""

    current = "current"  # per tensor, by its own largest entry
    delayed = "delayed"  # per tensor, by the largest entry of the last steps (amax history)
    # per 128 values; weights per block of 128 × 128
    block = "block"


class Fp8Part(Enum):
    """Linear layers whose GEMMs run in FP8."""

    linear = "linear"  # projections of attention, dense feed-forwards, shared experts
    head = "head"  # hidden states to logits
    experts = "experts"  # routed experts, with one scale per row


class LinearBackendKind(Enum):
    """Library that computes FP8 linear layers."""

    # transformer_engine on a GPU, with torch's grouped GEMM for experts; torch on a CPU
    auto = "auto"
    torch = "torch"  # reference: entries rounded to FP8, GEMMs in float32; slow
    transformer_engine = "transformer_engine"  # tensor cores, on Hopper GPUs and newer


class AttentionBackendKind(Enum):
    """Library that computes softmax attention."""

    # transformer_engine if train.deterministic=true, the host has it, and its memory suffices
    auto = "auto"
    torch = "torch"
    # cuDNN's kernels, also deterministic ones that torch lacks
    transformer_engine = "transformer_engine"


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


class BadFile(Enum):
    """Reaction to a corpus file that cannot be read or has the wrong format."""

    stop = "stop"  # end the run with a line that names the file
    skip = "skip"  # read nothing of it; a line at the start says so
    skip_rows = "skip_rows"  # leave out bad lines and rows only; a line at the start counts them


class Packing(Enum):
    """How documents become sequences."""

    stream = "stream"  # end to end, cut where a sequence is full
    # whole where they fit, each in the sequence that it fills best; padding fills the rest
    best_fit = "best_fit"


class Truncate(Enum):
    """What happens to a conversation longer than a sequence."""

    right = "right"  # cut at the right: its beginning stays
    left = "left"  # cut at the left: its end stays
    drop = "drop"  # left out
    error = "error"  # the start ends


class AfterEnd(Enum):
    """What a source of several does when all of its documents were read."""

    repeat = "repeat"  # start anew, in another order
    stop = "stop"  # leave the tokens to the others


class Source(Enum):
    """Source of documents."""

    stdlib = "stdlib"  # the text files of the running interpreter's standard library
    text = "text"  # one document per file
    jsonl = "jsonl"  # one JSON object per line
    parquet = "parquet"
    # a conversation per line or row of JSON lines or parquet; the assistant's turns are trained
    chat = "chat"
    megatron = "megatron"  # tokens in .bin and .idx files of Megatron-LM
    hub = "hub"  # a dataset by name, or a local folder in the same format


class Normalize(Enum):
    """Divisor of the summed token losses."""

    token = "token"  # valid tokens of the global batch: all microbatches and data-parallel ranks
    # each microbatch by its own valid tokens, then the mean over microbatches
    microbatch = "microbatch"


class BadStep(Enum):
    """Reaction to a non-finite loss or gradient norm, besides skipping the update."""

    skip = "skip"  # continue with the next batches
    stop = "stop"  # end the run
    rollback = "rollback"  # return to the newest checkpoint and skip the data since then


class OnCorruption(Enum):
    """Reaction to data that a replay shows to be corrupt."""

    stop = "stop"  # end the run
    rollback = "rollback"  # return to the newest checkpoint, once for each rank at fault
    # end the ranks of its node; the others start again, with a spare node or fewer ranks
    leave = "leave"


class Device(Enum):
    """Device that the run computes on."""

    auto = "auto"  # a GPU when there is one
    cpu = "cpu"
    cuda = "cuda"


class WandbMode(Enum):
    """Destination of the Weights & Biases run."""

    auto = "auto"  # online after `wandb login`, unless WANDB_MODE says otherwise; else offline
    offline = "offline"  # written to the run folder; `wandb sync` uploads it later
    online = "online"  # needs `wandb login` first
