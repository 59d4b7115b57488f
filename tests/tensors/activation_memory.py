"""Shared by test_activation_memory.py and other tests."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.choices import (
    ActivationKind,
    AttentionBackendKind,
    BlockKind,
    Dtype,
    LayerType,
    NormKind,
    Score,
)
from app.config import (
    DataConfig,
    LinearAttentionConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    TrainConfig,
    YarnConfig,
)
from app.engine.build import build_layer
from app.engine.rehearsal.clock import Alive
from app.fp8 import dispatch, ready, row_scaled
from app.kernels import (
    cross_entropy,
    pages,
    partial_sums,
    peer_rows,
    quantise,
    rms_norm,
    rows,
    short_convolution,
    swiglu,
)
from app.kernels.attention import heads
from app.kernels.common import DTYPES
from app.kernels.fp8 import swiglu as swiglu_fp8
from app.kernels.fp8 import weights
from app.kernels.routing import parts
from app.model.attention import delta_rule
from app.model.attention import modules as attention
from app.model.attention.linear import LinearAttention
from app.model.attention.softcap import SoftcapAttention
from app.model.attention.transformer_engine import TransformerEngineAttention
from app.model.block import Phase
from app.model.chunk import Chunk
from app.model.layers import layers, loss, norms
from app.model.layers.attend import BY_TORCH, Attend
from app.model.layers.layer_groups import ALONE
from app.model.layers.weight_grads import MainGradSink
from app.moe import permute, router, router_matmul
from app.moe.dispatch import expert_rows, paged_buffer
from app.moe.dispatch.local import LocalDispatcher
from app.plan.layout import ParallelLayout
from app.plan.memory.activations import MicrobatchMemory, chunk_activations
from app.plan.parts.attention import attends_by_matrices
from app.plan.recompute import recompute_policy
from app.plan.stages import Stage
from tests.forks import Patches
from tests.tensors.library_memory import as_library

SEQUENCES, LENGTH = 2, 128


DENSE = ModelConfig(
    num_layers=3, hidden_size=128, ffn_hidden_size=352, num_heads=8, num_kv_heads=8, vocab_size=1000
)


GROUPED = dataclasses.replace(DENSE, num_kv_heads=2, qk_norm=True, tie_embeddings=True)


SOFTMAX = MoEConfig(num_experts=16, top_k=4, ffn_hidden_size=64, first_k_dense=1, z_loss_coeff=0.1)


SIGMOID = dataclasses.replace(
    SOFTMAX,
    score=Score.sigmoid,
    shared_ffn_hidden_size=96,
    shared_gate=True,
    routed_scale=2.5,
    bias_update_rate=0.01,
    groups=4,
    topk_groups=2,
)


BEFORE = dataclasses.replace(
    SOFTMAX, pre_softmax=True, aux_loss_coeff=0.0, z_loss_coeff=0.0, shared_ffn_hidden_size=96
)


LATENT = dataclasses.replace(
    DENSE, mla=MLAConfig(96, 64, 8, qk_rope_head_dim=8, v_head_dim=12), yarn=YarnConfig()
)


LINEAR = dataclasses.replace(
    GROUPED,
    norm=NormKind.rms_plus_one,
    attention_gate=True,
    layer_types=(*[LayerType.linear_attention] * 2, LayerType.full_attention),
    linear_attention=LinearAttentionConfig(2, 4, key_head_dim=64, value_head_dim=64),
)


MODELS = {
    "dense": DENSE,
    "qk_norm": dataclasses.replace(DENSE, qk_norm=True, rotary_dim=4),
    "biases": dataclasses.replace(
        DENSE, num_kv_heads=4, qkv_bias=True, attn_out_bias=True, mlp_bias=True
    ),
    "norms_of_all_heads": dataclasses.replace(
        DENSE, num_kv_heads=4, qk_norm=True, qk_norm_whole=True
    ),
    "grouped_tied": GROUPED,
    "norm_after": dataclasses.replace(DENSE, block=BlockKind.norm_after),
    "norm_around": dataclasses.replace(
        DENSE,
        block=BlockKind.norm_around,
        norm=NormKind.rms_plus_one,
        activation=ActivationKind.gelu_tanh,
        embedding_scale=0.0,
        qk_norm=True,
        attention_softcap=50.0,
        logit_softcap=30.0,
    ),
    "parallel": dataclasses.replace(
        DENSE, block=BlockKind.parallel, norm=NormKind.layer, logit_scale=0.5
    ),
    "ungated": dataclasses.replace(
        GROUPED,
        norm=NormKind.layer_bias,
        mlp_gate=False,
        activation=ActivationKind.relu2,
        mlp_bias=True,
    ),
    "ungated_silu": dataclasses.replace(DENSE, mlp_gate=False),
    "parallel_norms": dataclasses.replace(
        DENSE,
        block=BlockKind.parallel_norms,
        norm=NormKind.layer_plus_one,
        mlp_gate=False,
        activation=ActivationKind.gelu,
    ),
    "residuals_scaled": dataclasses.replace(
        GROUPED, residual_scale=0.3, embedding_scale=6.0, logit_scale=0.5, moe=BEFORE
    ),
    "one_kv_head": dataclasses.replace(DENSE, num_kv_heads=1, head_dim=32),
    "softmax": dataclasses.replace(DENSE, moe=SOFTMAX),
    "softmax_before": dataclasses.replace(GROUPED, moe=BEFORE),
    "sigmoid_shared_gate": dataclasses.replace(DENSE, moe=SIGMOID),
    "latent": LATENT,
    "latent_queries_as_they_are": dataclasses.replace(
        LATENT, mla=MLAConfig(None, 48, 10, qk_rope_head_dim=6, v_head_dim=16)
    ),
    "linear": LINEAR,
    "linear_of_equal_heads": dataclasses.replace(
        LINEAR, linear_attention=LinearAttentionConfig(4, 4, key_head_dim=64, value_head_dim=32)
    ),
    "gated": dataclasses.replace(GROUPED, attention_gate=True),
    "linear_alone": dataclasses.replace(
        LINEAR,
        num_layers=1,
        ffn_hidden_size=32,
        vocab_size=64,
        layer_types=(LayerType.linear_attention,),
    ),
    "softmax_bias": dataclasses.replace(
        DENSE,
        moe=MoEConfig(num_experts=4, ffn_hidden_size=32, score=Score.softmax_bias),
    ),
    "sigmoid_one": dataclasses.replace(
        DENSE, moe=MoEConfig(num_experts=4, top_k=1, ffn_hidden_size=32, score=Score.sigmoid)
    ),
}


TORCH = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


# modules that take kernels in place of plain torch
CALLERS = (
    attention,
    delta_rule,
    dispatch,
    ready,
    expert_rows,
    layers,
    loss,
    norms,
    parts,
    permute,
    router,
    row_scaled,
    paged_buffer,
)


LAUNCHED = {
    heads: ("heads_forward", "heads_backward"),
    rms_norm: ("_forward", "_backward"),
    partial_sums: ("_sum",),
    swiglu: ("_forward", "_backward"),
    short_convolution: ("_forward", "_backward_sums", "_backward_tokens"),
    cross_entropy: ("_statistics", "_into_gradient"),
    rows: ("_spread", "_sum", "_gradients"),
    parts: ("_split",),
    quantise: ("_by_rows",),
    weights: ("_largest", "_both"),
    swiglu_fp8: ("_forward", "_backward"),
    pages: ("_take", "_put_back", "_copy"),
    peer_rows: ("_sum_partials", "_sum_dots"),
}


class Launch:
    """Takes the place of a kernel, and does nothing: what it would write stays as it was
    allocated.
    """

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: None


def with_kernels() -> Iterator[None]:
    """The model takes its kernels; for a fixture."""
    with Patches.context() as patch:
        for module in CALLERS:
            patch.setattr(
                module, "usable", lambda *tensors: all(tensor.dtype in DTYPES for tensor in tensors)
            )
        for module, names in LAUNCHED.items():
            for name in names:
                assert hasattr(module, name), "kernels go by these names"
                patch.setattr(module, name, Launch())
        patch.setattr(
            router,
            "top_experts",
            lambda scores_TE, top_k: torch.arange(top_k).repeat(len(scores_TE), 1),
        )
        patch.setattr(
            router_matmul,
            "wide_gemm",
            lambda left, right, dtype=torch.float32: left.new_zeros(
                len(left), right.shape[1], dtype=dtype
            ),
        )
        yield


def sums_of(run: Run) -> MainGradSink | None:
    """Sums of more bits than the parameters, in which gradients leave no trace."""
    return MainGradSink(lambda *_: None) if run.precision.params is not Dtype.float32 else None


def run_of(
    model: ModelConfig, dtype: Dtype, mask: bool = False, ordered: bool = False, **recompute: Any
) -> Run:
    return Run(
        model,
        train=TrainConfig(seq_len=LENGTH, micro_batch=SEQUENCES, deterministic=ordered),
        precision=PrecisionConfig(dtype),
        data=DataConfig(document_mask=mask),
        recompute=RecomputeConfig(**recompute),
    )


def planned(run: Run, embedding: bool = True, head: bool = True) -> MicrobatchMemory:
    stage = Stage(tuple(range(run.model.num_layers)), embedding, head)
    return chunk_activations(run, stage, ParallelLayout(1)).usual


def chunk_of(run: Run, embedding: bool = True, head: bool = True) -> Chunk:
    """A chunk of all layers whose gradients leave it at once, as the optimizer's buffers take
    them.
    """
    model, layers = run.model, {}
    for index in range(model.num_layers):
        experts = 0 if model.moe is None else model.moe.num_experts
        layers[index] = build_layer(model, index, ALONE, dispatcher=LocalDispatcher(experts))
    attend: Attend = BY_TORCH
    if model.attention_softcap is not None:
        attend = SoftcapAttention(model.attention_softcap)
    if run.train.attention_backend is AttentionBackendKind.transformer_engine:
        attend = TransformerEngineAttention(run.train.deterministic)
    chunk = Chunk(model, layers, embedding, head=head, attend=attend)
    chunk.to(TORCH[run.precision.params])
    for module in chunk.modules():
        if isinstance(module, LinearAttention):
            module.delta_rule = as_library
    for param in chunk.parameters():
        torch.nn.init.normal_(param, 0.0, 0.02)
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    return chunk


@dataclasses.dataclass
class Batch:
    """Input tensors of a chunk."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    ends: Tensor | None  # of documents: one per sequence


def batch_of(run: Run) -> Batch:
    tokens, labels = torch.randint(0, run.model.vocab_size, (2, SEQUENCES, LENGTH))
    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    return Batch(
        tokens,
        labels,
        positions,
        ends=torch.full((SEQUENCES, 1), LENGTH, dtype=torch.int32)
        if run.data.document_mask
        else None,
    )


def attention_of(run: Run) -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH) if attends_by_matrices(run) else nullcontext()


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def measured(run: Run) -> dict[str, int]:
    """Phase -> bytes of the storages that its operations are the first to save; parameters and
    inputs left out.
    """
    chunk, batch = chunk_of(run), batch_of(run)
    context = chunk.context(batch.positions, batch.ends, sums_of(run))
    seen = {address(tensor) for tensor in (*chunk.parameters(), batch.tokens, batch.labels)}
    tables = context.rotary.values()
    rotary = {address(each) for table in tables for each in (table.cos_BS1H, table.sin_BS1H)}
    found, alive = Counter[str](), []

    def saving(phase: str) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            alive.append(tensor)  # else another tensor may get the same address
            shared = address(tensor) in rotary
            if address(tensor) not in seen:
                found["rotary" if shared else phase] += tensor.untyped_storage().nbytes()
            seen.add(address(tensor))
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def watched(phase: Phase) -> Phase:
        def run_phase(*values: Any) -> tuple[Any, ...]:
            with saving(phase.name.value):
                return phase.run(*values)

        return dataclasses.replace(phase, run=run_phase)

    for layer in chunk.layers.values():
        layer.phases = tuple(map(watched, layer.phases))
        layer._attend = layer.phases[0].run
    with saving("head"), attention_of(run):
        chunk.loss(chunk(batch.tokens, context).x, batch.labels, context)
    return dict(found)


def forward_and_backward(run: Run, chunk: Chunk, whole: bool) -> tuple[int, int, int]:
    """Bytes at forward's peak, kept after it, and at backward's peak; a chunk without ends gets
    hidden states and gradients.
    """
    batch = batch_of(run)
    hidden = torch.randn(2, SEQUENCES, LENGTH, run.model.hidden_size).to(
        TORCH[run.precision.params]
    )
    x = batch.tokens if whole else hidden[0].clone().requires_grad_()
    inputs = [
        tensor
        for tensor in (batch.tokens, batch.labels, batch.positions, batch.ends)
        if tensor is not None
    ]
    known = [*chunk.parameters(), *inputs, x, hidden]
    with Alive(known) as alive, attention_of(run):
        roots = list(roots_of(run, chunk, batch, x=x, whole=whole))
        forward, kept = alive.peak, alive.live
        alive.peak = alive.live
        torch.autograd.backward(roots, [None if root.dim() == 0 else hidden[1] for root in roots])
        return forward, kept, alive.peak


def roots_of(run: Run, chunk: Chunk, batch: Batch, x: Tensor, whole: bool) -> Iterator[Tensor]:
    again = recompute_policy(run).usual
    context = chunk.context(batch.positions, batch.ends, sums_of(run), recompute=again)
    out = chunk(x, context)
    yield from (report.loss for report in out.routing if report.loss.requires_grad)
    yield chunk.loss(out.x, batch.labels, context) if whole else out.x
