"""Small models of Hugging Face families: their class and configuration, and ours."""

from __future__ import annotations

from typing import Any

import pytest

from app.choices import ActivationKind, BlockKind, LayerType, NormKind, Score
from app.config import (
    DynamicRopeConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    YarnConfig,
)
from tests.tensors import hf_linear
from tests.tensors.hf_weights import NEIGHBOURS

transformers = pytest.importorskip("transformers")


SIZES = {"hidden_size": 32, "vocab_size": 96}


HF_SIZES = SIZES | {
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "max_position_embeddings": 64,
}


# between them YaRN goes over from frequencies as they are to slower ones
TURNS = {"beta_fast": 1.5, "beta_slow": 0.2}
EQUAL_TURNS = {"beta_fast": 1.0, "beta_slow": 1.0}
FACTORS = {  # of heads of width 16
    "short_factors": (1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.5),
    "long_factors": (1.2, 1.6, 2.0, 2.7, 3.5, 4.2, 5.0, 6.0),
    "factor": 4.0,
}
EXACT = {"attention_factor": 0.8, "truncate": False}


def dense(
    kind: str,
    heads: int,
    kv_heads: int,
    width: int | None,
    tied: bool,
    theta: float = 10000.0,
    eps: float = 1e-5,
    yarn: dict[str, float] | None = None,
    llama3: dict[str, float] | None = None,
    windows: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
    linear: float | None = None,
    local: float | None = None,
    biased: bool = False,
    dynamic: float | None = None,
    longrope: dict[str, Any] | None = None,
    original: int | None = None,
) -> Any:
    """(Hugging Face class, its configuration, our configuration) of a dense model of `kind`,
    Llama, Mistral, Ministral, Qwen2, Qwen3, OLMo-2 or -3. `windows`: their keys and ours.
    `local`: base of rotary positions in layers with windows. `biased`: wherever the class has
    biases. `original`: length beyond which `dynamic` and `longrope` have other positions.
    """
    of_mlp = biased and kind in ("Llama", "SmolLM3", "SeedOss")
    scaled: dict[str, Any] = {"rope_type": "default"}
    if yarn is not None:
        scaled = {"rope_type": "yarn", "original_max_position_embeddings": 32, **yarn}
    if llama3 is not None:
        # between turning once and four times in 32 tokens, frequencies go over to slower ones
        turns = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaled = {"rope_type": "llama3", "original_max_position_embeddings": 32, **turns, **llama3}
    if linear is not None:
        scaled = {"rope_type": "linear", "factor": linear}
    if dynamic is not None:
        scaled = {"rope_type": "dynamic", "factor": dynamic}
    if longrope is not None:
        scaled = {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "short_factor": longrope["short_factors"],
            "long_factor": longrope["long_factors"],
            "factor": longrope["factor"],
        }
    rope_parameters: dict[str, Any] = {"rope_theta": theta, **scaled}
    if kind == "Olmo3":
        sliding = {"rope_theta": theta if local is None else local, "rope_type": "default"}
        rope_parameters = {"full_attention": rope_parameters, "sliding_attention": sliding}
    theirs = getattr(transformers, f"{kind}Config")(
        **HF_SIZES | ({} if original is None else {"max_position_embeddings": original}),
        num_hidden_layers=3,
        intermediate_size=56,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **({} if width is None else {"head_dim": width}),
        tie_word_embeddings=tied,
        rope_parameters=rope_parameters,
        rms_norm_eps=eps,
        **({"attention_bias": True} if biased else {}),
        **({"mlp_bias": True} if of_mlp else {}),
        **({"attention_out_bias": biased} if kind == "SeedOss" else {}),
        **windows[0],
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=3,
        ffn_hidden_size=56,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        tie_embeddings=tied,
        rope_theta=theta,
        local_rope_theta=local,
        norm_eps=eps,
        qk_norm=kind in ("Qwen3", "Olmo2", "Olmo3", "Exaone4"),
        qk_norm_whole=kind in ("Olmo2", "Olmo3"),
        qkv_bias=biased or kind in ("Qwen2", "SeedOss"),
        attn_out_bias=biased,
        mlp_bias=of_mlp,
        linear_rope_factor=1.0 if linear is None else linear,
        yarn=None if yarn is None else YarnConfig(original_length=32, mscale_all_dim=0, **yarn),
        llama3_rope=None if llama3 is None else Llama3RopeConfig(original_length=32, **llama3),
        dynamic_rope=None if dynamic is None else DynamicRopeConfig(dynamic, original),
        longrope=None if longrope is None else LongRopeConfig(original, **longrope),
        **windows[1],
    )
    return getattr(transformers, f"{kind}ForCausalLM"), theirs, ours


FULL, SLIDING, _ = LayerType
TYPES = (SLIDING, FULL, SLIDING)
BY_TYPES = {"layer_types": [each.value for each in TYPES], "sliding_window": 5}
MISTRAL = {"sliding_window": 5}, {"sliding_window": 5}
MINISTRAL = BY_TYPES, {"sliding_window": 5, "layer_types": TYPES}
QWEN = {**BY_TYPES, "use_sliding_window": True}, MINISTRAL[1]
SMOLLM3 = (
    {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    {"no_rope_layers": (1, 0), "layer_types": (FULL, SLIDING), "sliding_window": 5},
)  # fmt: skip
IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # of small vocabularies
OLMO2 = IDS, {"block": BlockKind.norm_after}
OLMO3 = {**IDS, **BY_TYPES}, {**MINISTRAL[1], **OLMO2[1]}
EXAONE4 = {**IDS, **BY_TYPES}, {**MINISTRAL[1], **OLMO2[1], "no_rope_layers": (1, 0)}
LATER_LAYERS = (
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    {"sliding_window": 5, "layer_types": (FULL, SLIDING, SLIDING)},
)


def attention_biases(biased: bool) -> dict[str, bool]:
    """Our keys of attention_bias."""
    return {"qkv_bias": biased, "attn_out_bias": biased}


GEMMA = {
    "block": BlockKind.norm_around,
    "norm": NormKind.rms_plus_one,
    "activation": ActivationKind.gelu_tanh,
    "embedding_scale": 0.0,
    "query_pre_attn_scalar": 24,
}


def gemma(
    version: int,
    local: float | None = None,
    biased: bool = False,
    linear: float = 1.0,
    **caps: float | None,
) -> Any:
    """Like `dense`, Gemma 2 or 3, with windows in two of three layers. `linear`: factor of
    positions in the other one, of Gemma 3.
    """
    kind = "Gemma2" if version == 2 else "Gemma3Text"
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    if version == 3:
        sliding = {"rope_type": "default", "rope_theta": local or 1e4}
        if linear != 1:
            rotary |= {"rope_type": "linear", "factor": linear}
        rotary = {"full_attention": rotary, "sliding_attention": sliding}
    theirs = getattr(transformers, f"{kind}Config")(
        **HF_SIZES,
        **BY_TYPES,
        **IDS,
        num_hidden_layers=3,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=caps.get("attention_softcap"),
        final_logit_softcapping=caps.get("logit_softcap"),
        rope_parameters=rotary,
        attention_bias=biased,
    )
    ours = ModelConfig(
        **SIZES,
        **MINISTRAL[1],
        **GEMMA,
        **caps,
        **attention_biases(biased),
        num_layers=3,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        qk_norm=version == 3,
        local_rope_theta=local,
        linear_rope_factor=linear,
        norm_eps=1e-6,
        tie_embeddings=True,
    )
    name = "Gemma2ForCausalLM" if version == 2 else "Gemma3ForCausalLM"
    return getattr(transformers, name), theirs, ours


def cohere2(scale: float, biased: bool = False) -> Any:
    """Like `dense`, with a window and rotary positions in two of three layers."""
    theirs = transformers.Cohere2Config(
        **HF_SIZES,
        **BY_TYPES,
        **IDS,
        num_hidden_layers=3,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=scale,
        rope_parameters={"rope_type": "default", "rope_theta": 1e3},
        attention_bias=biased,
    )
    ours = ModelConfig(
        **SIZES,
        **MINISTRAL[1],
        **attention_biases(biased),
        block=BlockKind.parallel,
        norm=NormKind.layer,
        no_rope_layers=(1, 0),
        logit_scale=scale,
        num_layers=3,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=2,
        rope_theta=1e3,
        tie_embeddings=True,
    )
    return transformers.Cohere2ForCausalLM, theirs, ours


def qwen3_moe(
    normalised: bool,
    tied: bool,
    sparse_step: int = 1,
    window: int | None = None,
    biased: bool = False,
) -> Any:
    """Like `dense`, with 12 experts and top-3; with a sparse step of 2 the layers 1 and 3 have
    experts.
    """
    theirs = transformers.Qwen3MoeConfig(
        **HF_SIZES,
        num_hidden_layers=4,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=normalised,
        tie_word_embeddings=tied,
        decoder_sparse_step=sparse_step,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        use_sliding_window=window is not None,
        sliding_window=window,
        attention_bias=biased,
    )
    sparse = {"every_n": sparse_step, "first_k_dense": sparse_step - 1}
    moe = MoEConfig(
        num_experts=12, top_k=3, ffn_hidden_size=24, pre_softmax=not normalised, **sparse
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=4,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        qk_norm=True,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=tied,
        sliding_window=window,
        **attention_biases(biased),
        moe=moe,
    )
    return transformers.Qwen3MoeForCausalLM, theirs, ours


def mixtral(kv_heads: int, tied: bool, window: int | None = None) -> Any:
    """Like `dense`, with 8 experts and top-2."""
    theirs = transformers.MixtralConfig(
        **HF_SIZES,
        num_hidden_layers=3,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        sliding_window=window,
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=3,
        num_heads=4,
        num_kv_heads=kv_heads,
        rope_theta=1e6,
        sliding_window=window,
        tie_embeddings=tied,
        moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=40),
    )
    return transformers.MixtralForCausalLM, theirs, ours


def olmoe(kv_heads: int, normalised: bool, biased: bool = False) -> Any:
    """Like `dense`, with 8 experts, top-3 and norms over all heads."""
    theirs = transformers.OlmoeConfig(
        **HF_SIZES,
        num_hidden_layers=3,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=normalised,
        pad_token_id=None,
        eos_token_id=None,
        attention_bias=biased,
    )
    ours = ModelConfig(
        **SIZES,
        **attention_biases(biased),
        num_layers=3,
        num_heads=4,
        num_kv_heads=kv_heads,
        qk_norm=True,
        qk_norm_whole=True,
        moe=MoEConfig(num_experts=8, top_k=3, ffn_hidden_size=24, pre_softmax=not normalised),
    )
    return transformers.OlmoeForCausalLM, theirs, ours


def gpt_oss(biased: bool = True, window: int = 5, limit: float = 1.5) -> Any:
    """Like `dense`, with sinks, biases, and 8 experts with a clamped activation, top-3."""
    theirs = transformers.GptOssConfig(
        **HF_SIZES,
        num_hidden_layers=3,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        attention_bias=biased,
        sliding_window=window,
        swiglu_limit=limit,
        rope_parameters={
            "rope_theta": 1e4,
            "rope_type": "yarn",
            "original_max_position_embeddings": 16,
            "factor": 4.0,
            "truncate": False,
            **TURNS,
        },
    )
    moe = MoEConfig(
        num_experts=8,
        top_k=3,
        ffn_hidden_size=24,
        expert_bias=True,
        logit_bias=True,
        swiglu_limit=limit,
        aux_loss_coeff=0.001,
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        qkv_bias=biased,
        attn_out_bias=biased,
        sinks=True,
        sliding_window=window,
        layer_types=(SLIDING, FULL),
        yarn=YarnConfig(factor=4.0, original_length=16, mscale_all_dim=0, truncate=False, **TURNS),
        moe=moe,
    )
    return transformers.GptOssForCausalLM, theirs, ours


def qwen2_moe(biases: bool = False, normalised: bool = False, top_k: int = 2) -> Any:
    """Like `dense`, with a gated shared expert; layer 1 has no experts."""
    windows = {} if not biases else {"use_sliding_window": True, "sliding_window": 5}
    theirs = transformers.Qwen2MoeConfig(
        **HF_SIZES,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=56,
        num_experts=8,
        num_experts_per_tok=top_k,
        norm_topk_prob=normalised,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
        qkv_bias=biases,
        rms_norm_eps=1e-6,
        tie_word_embeddings=biases,
        **windows,
    )
    moe = MoEConfig(
        top_k=top_k,
        ffn_hidden_size=24,
        dense_layers=(1,),
        shared_ffn_hidden_size=40,
        shared_gate=True,
        pre_softmax=not normalised,
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=3,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=2,
        norm_eps=1e-6,
        qkv_bias=biases,
        tie_embeddings=biases,
        sliding_window=5 if biases else None,
        layer_types=(SLIDING, FULL, SLIDING) if biases else (),
        moe=moe,
    )
    return transformers.Qwen2MoeForCausalLM, theirs, ours


def glm4_moe(part: float = 0.5, biased: bool = True, normed: bool = True, **yarn: float) -> Any:
    """Like `dense`, with 16 experts in 4 groups and top-4 from 2 groups; the first layer is
    dense. `part`: of a head that is rotated.
    """
    scaled: dict[str, Any] = {"rope_type": "default"}
    if yarn:
        scaled = {"rope_type": "yarn", "original_max_position_embeddings": 32, **yarn}
    theirs = transformers.Glm4MoeConfig(
        **HF_SIZES,
        num_hidden_layers=3,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=24,
        n_shared_experts=2,
        routed_scaling_factor=1.8,
        first_k_dense_replace=1,
        use_qk_norm=normed,
        attention_bias=biased,
        rope_parameters={**scaled, "rope_theta": 1e3, "partial_rotary_factor": part},
    )
    moe = MoEConfig(
        num_experts=16,
        top_k=4,
        ffn_hidden_size=24,
        first_k_dense=1,
        shared_ffn_hidden_size=48,
        score=Score.sigmoid,
        groups=4,
        topk_groups=2,
        routed_scale=1.8,
        bias_update_rate=0.001,
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=3,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=1e3,
        rotary_dim=None if part == 1 else int(16 * part),
        qk_norm=normed,
        qkv_bias=biased,
        yarn=YarnConfig(original_length=32, mscale_all_dim=0, **yarn) if yarn else None,
        moe=moe,
    )
    return transformers.Glm4MoeForCausalLM, theirs, ours


def minimax_m2(top_k: int = 3, part: float = 0.5) -> Any:
    """Like `dense`, with 8 experts chosen by sigmoids; `part`: of a head that is rotated."""
    theirs = transformers.MiniMaxM2Config(
        **HF_SIZES,
        **IDS,
        num_hidden_layers=3,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=top_k,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e3,
            "partial_rotary_factor": part,
        },
    )
    moe = MoEConfig(
        num_experts=8,
        top_k=top_k,
        ffn_hidden_size=24,
        score=Score.sigmoid,
        norm_topk_prob=True,
        bias_update_rate=0.001,
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=1e3,
        rotary_dim=None if part == 1 else int(16 * part),
        norm_eps=1e-6,
        qk_norm=True,
        qk_norm_whole=True,
        moe=moe,
    )
    return transformers.MiniMaxM2ForCausalLM, theirs, ours


def ernie4_5(biased: bool = False, tied: bool = True) -> Any:
    """Like `dense`; the base of positions says that neighbouring values rotate."""
    theirs = transformers.Ernie4_5Config(
        **HF_SIZES,
        **IDS,
        num_hidden_layers=3,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_bias=biased,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": NEIGHBOURS},
    )
    ours = ModelConfig(
        **SIZES,
        **attention_biases(biased),
        mlp_bias=biased,
        num_layers=3,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=NEIGHBOURS,
        tie_embeddings=tied,
    )
    return transformers.Ernie4_5ForCausalLM, theirs, ours


def ernie4_5_moe(shared: int = 2, tied: bool = True, end: int = -1, interval: int = 1) -> Any:
    """Like `ernie4_5`, with 12 experts, top-3; the first layer is dense. `end`, `interval`: of
    layers with experts.
    """
    theirs = transformers.Ernie4_5_MoeConfig(
        **HF_SIZES,
        **IDS,
        num_hidden_layers=4,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=24,
        moe_k=3,
        moe_num_experts=12,
        moe_num_shared_experts=shared,
        moe_layer_start_index=1,
        moe_layer_end_index=end,
        moe_layer_interval=interval,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": NEIGHBOURS},
    )
    moe = MoEConfig(
        num_experts=12,
        top_k=3,
        ffn_hidden_size=24,
        first_k_dense=1,
        every_n=interval,
        dense_layers=(3,) if end == 2 else (),
        shared_ffn_hidden_size=24 * shared,
        score=Score.softmax_bias,
        bias_update_rate=0.001,
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=4,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=2,
        rope_theta=NEIGHBOURS,
        tie_embeddings=tied,
        moe=moe,
    )
    return transformers.Ernie4_5_MoeForCausalLM, theirs, ours


HEADS = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 10}


def their_deepseek(
    version: int,
    q_rank: int | None,
    groups: bool,
    yarn: dict[str, float],
    eps: float,
    **router: Any,
) -> Any:
    """The configuration of `transformers` that `deepseek` compares with."""
    limited: dict[str, Any] = {"n_group": 4, "topk_group": 2}
    if version == 2:
        limited = limited | {"topk_method": "group_limited_greedy"} if groups else {}
    elif not groups:
        limited = {"n_group": 1, "topk_group": 1}
    return getattr(transformers, f"DeepseekV{version}Config")(
        **HF_SIZES | {"max_position_embeddings": 256},
        **limited,
        **router,
        num_hidden_layers=3,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_rank,
        **HEADS,
        n_routed_experts=16,
        moe_intermediate_size=24,
        n_shared_experts=2,
        routed_scaling_factor=1.8,
        first_k_dense_replace=1,
        rms_norm_eps=eps,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e3,
            "original_max_position_embeddings": 32,
            "mscale_all_dim": 0.7,
            **yarn,
        },
    )


def deepseek(
    version: int,
    q_rank: int | None,
    groups: bool,
    mscale: float = 1.0,
    eps: float = 1e-6,
    top_k: int = 4,
    normalised: bool = True,
    turns: dict[str, float] = TURNS,
    biased: bool = False,
) -> Any:
    """Like `dense`, with multi-head latent attention and YaRN; the first layer is dense, then 16
    experts, optionally in 4 groups, with `top_k` from 2 groups. `normalised`: sigmoid scores.
    """
    yarn = {"factor": 8.0, "mscale": mscale, **turns}
    limits = {"groups": 4, "topk_groups": 2} if groups else {}
    router: dict[str, Any] = {"num_experts_per_tok": top_k}
    router |= {"mlp_bias": True} if biased else {}
    kind: dict[str, Any] = {"score": Score.sigmoid, "bias_update_rate": 0.001}
    if version == 3:
        router["norm_topk_prob"] = normalised
        kind["norm_topk_prob"] = normalised
    else:
        kind = {"pre_softmax": True, "group_best": 1 if groups else None}
    moe = MoEConfig(
        num_experts=16,
        top_k=top_k,
        ffn_hidden_size=24,
        first_k_dense=1,
        shared_ffn_hidden_size=48,
        routed_scale=1.8,
        **limits,
        **kind,
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=3,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=4,
        rope_theta=1e3,
        norm_eps=eps,
        mlp_bias=biased,
        moe=moe,
        mla=MLAConfig(q_lora_rank=q_rank, **HEADS, norm_eps=1e-6),
        yarn=YarnConfig(original_length=32, mscale_all_dim=0.7, **yarn),
    )
    theirs = their_deepseek(version, q_rank, groups, yarn=yarn, eps=eps, **router)
    return getattr(transformers, f"DeepseekV{version}ForCausalLM"), theirs, ours


def glm4_moe_lite() -> Any:
    """Like `deepseek`, with unscaled positions; layers 0 and 2 are dense."""
    theirs = transformers.Glm4MoeLiteConfig(
        **HF_SIZES,
        num_hidden_layers=4,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        **HEADS,
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=24,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    moe = MoEConfig(
        num_experts=16,
        top_k=4,
        ffn_hidden_size=24,
        first_k_dense=1,
        dense_layers=(2,),
        shared_ffn_hidden_size=24,
        routed_scale=1.8,
        score=Score.sigmoid,
        bias_update_rate=0.001,
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=4,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=4,
        moe=moe,
        mla=MLAConfig(q_lora_rank=24, **HEADS, norm_eps=1e-6),
    )
    return transformers.Glm4MoeLiteForCausalLM, theirs, ours


def phi3(part: float = 1.0, long: bool = False, window: int | None = None) -> Any:
    """Like `dense`; `part` of each head is rotated, with `long` by LongRoPE beyond 15 tokens."""
    factors = {key: each[: int(4 * part)] for key, each in FACTORS.items() if key != "factor"}
    scaled = {f"{name.split('_')[0]}_factor": list(each) for name, each in factors.items()}
    rotary = {"rope_type": "longrope", **scaled} if long else {"rope_type": "default"}
    theirs = transformers.Phi3Config(
        **HF_SIZES | {"max_position_embeddings": 60},
        **IDS,
        num_hidden_layers=3,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=2,
        original_max_position_embeddings=15,
        sliding_window=window,
        rope_parameters={"rope_theta": 1e2, "partial_rotary_factor": part, **rotary},
        tie_word_embeddings=part != 1,
    )
    ours = ModelConfig(
        **SIZES,
        num_layers=3,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=2,
        rope_theta=1e2,
        rotary_dim=None if part == 1 else int(8 * part),
        longrope=LongRopeConfig(15, **factors, factor=4.0) if long else None,
        sliding_window=window,
        tie_embeddings=part != 1,
    )
    return transformers.Phi3ForCausalLM, theirs, ours


def ungated(kind: str, biased: bool = True, act: str = "gelu", **changes: Any) -> Any:
    """Like `dense`, without gates: StarCoder2, Nemotron or GPT-NeoX (`changes` of ours, with what
    makes them in theirs).
    """
    part = 0.5 if kind != "Starcoder2" else 1.0
    biases = {"Starcoder2": {"use_bias": biased}, "GPTNeoX": {"attention_bias": biased}}
    own: dict[str, Any] = biases.get(kind, {"attention_bias": biased, "mlp_bias": biased})
    parallel = changes.get("block") is BlockKind.parallel_norms
    own |= {"use_parallel_residual": parallel} if kind == "GPTNeoX" else {}
    own |= {"num_key_value_heads": 2} if kind != "GPTNeoX" else {}
    own |= {"sliding_window": 5} if "sliding_window" in changes else {}
    rotary = {"rope_type": "default", "rope_theta": 1e2}
    theirs = getattr(transformers, f"{kind}Config")(
        **HF_SIZES,
        **IDS,
        **own,
        num_hidden_layers=3,
        intermediate_size=56,
        num_attention_heads=4,
        hidden_act=act,
        tie_word_embeddings=not biased,
        rope_parameters=rotary if part == 1 else {**rotary, "partial_rotary_factor": part},
    )
    acts = {"relu2": ActivationKind.relu2, "gelu_pytorch_tanh": ActivationKind.gelu_tanh}
    norm = NormKind.layer_plus_one if kind == "Nemotron" else NormKind.layer_bias
    ours = ModelConfig(
        **SIZES,
        **attention_biases(biased),
        **changes,
        num_layers=3,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=4 if kind == "GPTNeoX" else 2,
        rope_theta=1e2,
        rotary_dim=None if part == 1 else 4,
        norm=norm,
        activation=acts.get(act, ActivationKind.gelu),
        mlp_gate=False,
        mlp_bias=biased or kind == "GPTNeoX",
        tie_embeddings=not biased,
    )
    return getattr(transformers, f"{kind}ForCausalLM"), theirs, ours


FACTORS_OF_GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.7,
}
OUR_FACTORS = {"embedding_scale": 6.0, "residual_scale": 0.3, "logit_scale": 1 / 0.7}


def granite(biased: bool = False, experts: bool = False) -> Any:
    """Like `dense`, with four factors, and with `experts` 8 of them, top-3."""
    kind = "GraniteMoe" if experts else "Granite"
    biases = {} if experts else {"mlp_bias": biased}
    routed = {"num_local_experts": 8, "num_experts_per_tok": 3} if experts else {}
    theirs = getattr(transformers, f"{kind}Config")(
        **HF_SIZES | {"initializer_range": 0.02},
        **IDS,
        **FACTORS_OF_GRANITE,
        **biases,
        **routed,
        num_hidden_layers=3,
        intermediate_size=24 if experts else 56,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=biased,
        tie_word_embeddings=not biased,
        rope_parameters={"rope_type": "default", "rope_theta": 1e3},
    )
    ours = ModelConfig(
        **SIZES,
        **OUR_FACTORS,
        **attention_biases(biased),
        **biases,
        query_pre_attn_scalar=25.0,
        num_layers=3,
        ffn_hidden_size=56,
        num_heads=4,
        num_kv_heads=2,
        norm_eps=1e-6,
        rope_theta=1e3,
        tie_embeddings=not biased,
        moe=MoEConfig(num_experts=8, top_k=3, ffn_hidden_size=24) if experts else None,
    )
    return getattr(transformers, f"{kind}ForCausalLM"), theirs, ours


NEOX = {"block": BlockKind.parallel_norms}
CASES = {
    "starcoder2": lambda: ungated("Starcoder2", act="gelu_pytorch_tanh", sliding_window=5),
    "starcoder2-no-biases": lambda: ungated("Starcoder2", biased=False),
    "nemotron": lambda: ungated("Nemotron", biased=False, act="relu2"),
    "nemotron-biases": lambda: ungated("Nemotron", act="relu2"),
    "gpt-neox": lambda: ungated("GPTNeoX", **NEOX),
    "gpt-neox-sequential": lambda: ungated("GPTNeoX", biased=False),
    "phi3": lambda: phi3(part=0.75, window=5),
    "phi3-whole": phi3,
    "phi3-long": lambda: phi3(part=0.75, long=True),
    "granite": granite,
    "granite-biases": lambda: granite(biased=True),
    "granitemoe": lambda: granite(experts=True),
    "granitemoe-biases": lambda: granite(experts=True, biased=True),
    "llama-gqa": lambda: dense("Llama", 4, 2, width=8, tied=False),
    "llama-gqa-tied": lambda: dense("Llama", 4, 2, width=8, tied=True, theta=5e5),
    "llama-mha": lambda: dense("Llama", 4, 4, width=8, tied=False, eps=1e-2),
    "llama-mqa-wide-heads": lambda: dense("Llama", 4, 1, width=12, tied=False),
    "llama-yarn": lambda: dense(
        "Llama", 4, 2, width=16, tied=False, theta=1e3, yarn={"factor": 2.0, **TURNS}
    ),
    # a base so small that all pairs rotate slowly
    "llama-yarn-small-base": lambda: dense(
        "Llama", 4, 2, width=16, tied=False, theta=1.1, yarn={"factor": 2.0, **TURNS}
    ),
    "llama-3.1": lambda: dense(
        "Llama", 4, 2, width=16, tied=True, theta=1e3, llama3={"factor": 8.0}
    ),
    "llama-linear": lambda: dense("Llama", 4, 2, width=8, tied=False, theta=1e3, linear=4.0),
    "llama-yarn-not-truncated": lambda: dense(
        "Llama", 4, 2, width=16, tied=True, theta=1e3, yarn={"factor": 2.0, **TURNS, **EXACT}
    ),
    "seed-oss": lambda: dense("SeedOss", 4, 2, width=16, tied=False, windows=(IDS, {})),
    "seed-oss-tied": lambda: dense("SeedOss", 4, 2, width=16, tied=True, windows=(IDS, {})),
    "qwen2-moe": lambda: qwen2_moe(biases=True),
    "qwen2-moe-top-1": lambda: qwen2_moe(normalised=True, top_k=1),
    "kimi-k2": lambda: deepseek(
        3, q_rank=24, groups=False, turns={"beta_fast": 1.0, "beta_slow": 1.0}
    ),
    "glm4-moe-lite": glm4_moe_lite,
    "mistral": lambda: dense("Mistral", 4, 2, width=8, tied=False, windows=MISTRAL),
    "ministral": lambda: dense("Ministral", 4, 2, width=8, tied=False, windows=MINISTRAL),
    "smollm3": lambda: dense("SmolLM3", 4, 2, width=None, tied=True, windows=SMOLLM3),
    "qwen2-windows": lambda: dense("Qwen2", 4, 2, width=None, tied=False, windows=LATER_LAYERS),
    "qwen3-windows": lambda: dense("Qwen3", 4, 2, width=16, tied=False, windows=QWEN),
    "qwen3-moe-windows": lambda: qwen3_moe(normalised=True, tied=False, window=5),
    "mixtral-windows": lambda: mixtral(2, tied=False, window=5),
    "qwen2-gqa": lambda: dense("Qwen2", 4, 2, width=None, tied=False),
    "qwen3-gqa": lambda: dense("Qwen3", 6, 3, width=16, tied=False),
    "qwen3-gqa-tied": lambda: dense("Qwen3", 8, 2, width=16, tied=True),
    "qwen3-moe": lambda: qwen3_moe(normalised=True, tied=False),
    "qwen3-moe-tied": lambda: qwen3_moe(normalised=True, tied=True),
    "qwen3-moe-not-normalised": lambda: qwen3_moe(normalised=False, tied=False),
    "qwen3-moe-every-second-layer": lambda: qwen3_moe(normalised=True, tied=False, sparse_step=2),
    "mixtral-gqa": lambda: mixtral(kv_heads=2, tied=False),
    "mixtral-mha-tied": lambda: mixtral(kv_heads=4, tied=True),
    "olmo2": lambda: dense("Olmo2", 4, 4, width=None, tied=False, windows=OLMO2),
    "olmo2-gqa": lambda: dense("Olmo2", 4, 2, width=None, tied=False, windows=OLMO2),
    "olmo3": lambda: dense("Olmo3", 4, 2, width=None, tied=False, theta=5e5, windows=OLMO3),
    "olmo3-yarn": lambda: dense(
        "Olmo3",
        4,
        2,
        width=None,
        tied=False,
        theta=5e5,
        yarn={"factor": 2.0, **TURNS},
        windows=OLMO3,
        local=5e5,
    ),
    "exaone4": lambda: dense("Exaone4", 4, 2, width=16, tied=False, windows=EXAONE4),
    "exaone4-no-windows": lambda: dense(
        "Exaone4",
        4,
        2,
        width=None,
        tied=True,
        theta=1e3,
        llama3={"factor": 8.0},
        windows=({**IDS, "sliding_window": None, "layer_types": ["full_attention"] * 3}, OLMO2[1]),
    ),
    "gemma2": lambda: gemma(2, attention_softcap=2.0, logit_softcap=3.0),
    "gemma2-no-caps": lambda: gemma(2),
    "gemma3": lambda: gemma(3, local=3e2),
    "gemma3-cap": lambda: gemma(3, logit_softcap=3.0),
    "cohere2": lambda: cohere2(0.5),
    "cohere2-odd-scale": lambda: cohere2(1.3),
    "olmoe": lambda: olmoe(kv_heads=4, normalised=False),
    "olmoe-gqa": lambda: olmoe(kv_heads=2, normalised=True),
    "gpt-oss": gpt_oss,
    "gpt-oss-no-attention-bias": lambda: gpt_oss(biased=False, window=9, limit=0.5),
    "qwen2-moe-shared-gate": qwen2_moe,
    "qwen3-next": hf_linear.qwen3_next,
    "qwen3-5": hf_linear.qwen3_5,
    "qwen3-5-tied": lambda: hf_linear.qwen3_5(tied=True),
    "qwen3-5-moe": hf_linear.qwen3_5_moe,
    "glm4-moe": glm4_moe,
    "glm4-moe-whole-heads": lambda: glm4_moe(1.0, biased=False),
    "glm4-moe-quarter-yarn": lambda: glm4_moe(0.25, normed=False, factor=2.0, **TURNS),
    "minimax-m2": minimax_m2,
    "minimax-m2-top-1-whole-heads": lambda: minimax_m2(top_k=1, part=1.0),
    "ernie4-5": ernie4_5,
    "ernie4-5-biases": lambda: ernie4_5(biased=True, tied=False),
    "ernie4-5-moe": ernie4_5_moe,
    "ernie4-5-moe-no-shared": lambda: ernie4_5_moe(shared=0, tied=False, end=2),
    "ernie4-5-moe-every-second": lambda: ernie4_5_moe(shared=1, interval=2),
    "deepseek-v2": lambda: deepseek(2, q_rank=24, groups=True),
    "deepseek-v2-lite": lambda: deepseek(2, q_rank=None, groups=False, mscale=0.7),
    "deepseek-v2-large-eps": lambda: deepseek(2, q_rank=24, groups=False, eps=3e-2),
    # shorter than the sequences of runs, and no shorter than texts that tests generate
    "llama-longrope": lambda: dense(
        "Llama", 4, 2, width=16, tied=False, theta=1e2, longrope=FACTORS, original=15
    ),
    "llama-dynamic": lambda: dense(
        "Llama", 4, 2, width=16, tied=True, theta=1e2, dynamic=2.0, original=15
    ),
    "llama-biases": lambda: dense("Llama", 4, 2, width=8, tied=False, biased=True),
    "smollm3-biases": lambda: dense(
        "SmolLM3", 4, 2, width=None, tied=True, windows=SMOLLM3, biased=True
    ),
    "qwen3-biases": lambda: dense("Qwen3", 4, 2, width=16, tied=False, biased=True),
    "qwen3-moe-biases": lambda: qwen3_moe(normalised=True, tied=False, biased=True),
    "seed-oss-biases": lambda: dense(
        "SeedOss", 4, 2, width=16, tied=False, windows=(IDS, {}), biased=True
    ),
    "olmo2-biases": lambda: dense(
        "Olmo2", 4, 2, width=None, tied=False, windows=OLMO2, biased=True
    ),
    "olmoe-biases": lambda: olmoe(kv_heads=2, normalised=True, biased=True),
    "gemma2-biases": lambda: gemma(2, biased=True),
    "gemma3-linear": lambda: gemma(3, local=3e2, linear=8.0),
    "gemma3-linear-same-base": lambda: gemma(3, local=1e4, linear=8.0),
    "gemma3-biases": lambda: gemma(3, local=3e2, biased=True),
    "cohere2-biases": lambda: cohere2(0.5, biased=True),
    "deepseek-v2-biases": lambda: deepseek(2, q_rank=24, groups=True, biased=True),
    "deepseek-v3": lambda: deepseek(3, q_rank=24, groups=True),
    "deepseek-v3-large-eps": lambda: deepseek(3, q_rank=24, groups=True, eps=3e-2),
    "deepseek-v3-top-1": lambda: deepseek(3, q_rank=None, groups=False, top_k=1),
    "deepseek-v3-not-normalised": lambda: deepseek(3, q_rank=None, groups=True, normalised=False),
    "deepseek-v3-top-1-not-normalised": lambda: deepseek(
        3, q_rank=24, groups=False, top_k=1, normalised=False
    ),
}
