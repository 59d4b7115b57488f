"""Folders of Hugging Face models become ours: the same logits, and of a rank's part no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.cli.options.keys import all_keys
from app.config.model import SCALINGS
from app.engine.start.resume import is_fixed
from app.errors import ConfigError
from app.hf.families import ARCHITECTURE, OF_EXPERTS, differences, family_named, family_of
from app.hf.file_names import CONFIG_JSON, INDEX, ONE_FILE
from app.hf.pretrained import Pretrained
from app.hf.supported import FAMILIES
from app.hf.their_config import TheirConfig
from app.hf.their_model import TheirModel
from app.plan.sharding.blocks import ShardCoords
from tests import hf_folders
from tests.config import load
from tests.hf_folders import (
    KEY,
    edit_config,
    edit_tensors,
    loaded,
    save_random,
    split_into_two,
    their_logits,
    transformers,
)
from tests.tensors.models import draw_tokens, forward


@pytest.mark.every(3)
@pytest.mark.parametrize("name", hf_folders.FAMILIES)
@torch.no_grad()
def test_a_folder_is_read_as_the_model_that_it_is(name: str, tmp_path: Path):
    theirs, ours = save_random(name, tmp_path)
    chunk = loaded(tmp_path)
    assert list(differences(chunk.model, ours)) == []
    tokens = draw_tokens(ours, 2, 17)
    expected = their_logits(theirs, tokens)
    assert expected.std() > 0.5
    torch.testing.assert_close(forward(chunk, tokens).x, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_in_one_tensor_are_the_same_experts(name: str, tmp_path: Path):
    save_random(name, tmp_path / "per_expert")
    save_random(name, tmp_path / "stacked", per_expert=False)
    one, other = loaded(tmp_path / "per_expert"), loaded(tmp_path / "stacked")
    assert_same(one.state_dict(), other.state_dict())


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def test_several_files_are_read_by_their_index(tmp_path: Path):
    save_random("qwen3", tmp_path)
    before = loaded(tmp_path).state_dict()
    split_into_two(tmp_path)
    assert_same(before, loaded(tmp_path).state_dict())


@pytest.mark.parametrize("index", ["{}", None])
@torch.no_grad()
def test_of_one_file_and_an_index_the_file_counts(index: str | None, tmp_path: Path):
    """The single file wins, as in `transformers`; the other weights are twice as large, or the
    index is broken.
    """
    save_random("qwen3", tmp_path)
    one = (tmp_path / ONE_FILE).read_bytes()
    edit_tensors(tmp_path, lambda tensors: [value.mul_(2) for value in tensors.values()])
    split_into_two(tmp_path)
    (tmp_path / ONE_FILE).write_bytes(one)
    if index is not None:
        (tmp_path / INDEX).write_text(index)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    chunk = loaded(tmp_path)
    tokens = draw_tokens(chunk.model, 2, 9)
    ours, expected = forward(chunk, tokens).x, their_logits(theirs, tokens)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_config_that_we_write_is_read_as_the_same_model(family: Any, tmp_path: Path):
    _, ours = save_random(family.model_type, tmp_path)
    if family.written_as is not None:
        return
    assert family_of(ours, "resume", "runs/x") is family
    config = TheirConfig(family.written(ours), tmp_path / CONFIG_JSON, KEY)
    assert family_named(config) is family
    (tmp_path / CONFIG_JSON).write_text(json.dumps(config.values))
    assert list(differences(TheirModel.read(tmp_path, KEY).model, ours)) == []


def test_what_makes_two_models_the_same_is_what_runs_hold_on_to():
    """A new key of the model that a run cannot change counts here too, or says why it does not."""
    counted = {f"model.{name}" for name in ARCHITECTURE} | {f"model.moe.{n}" for n in OF_EXPERTS}
    # how tokens are dropped in training, which no config.json says
    left = {"model.moe.capacity_factor", "model.moe.drop_policy", "model.moe.force_balance"}
    keys = {key for key in all_keys() if key.startswith("model.")}
    fixed = {key for key in keys - {"model.moe.static", "model.moe.echo"} if is_fixed(key)}
    sections = ("mla", "linear_attention", *SCALINGS)
    inside = {key for key in fixed if key.startswith(tuple(f"model.{name}." for name in sections))}
    inside |= {"model.mtp.layers"}
    assert fixed - inside - {"model.moe"} - left == counted


def test_a_model_of_no_family_is_refused_with_what_is_special():
    model = load("model=smallmoe").model
    with pytest.raises(ConfigError) as refused:
        family_of(model, "resume", "runs/x")
    assert str(refused.value) == (
        "resume=runs/x: no supported Hugging Face family computes the same as this model; "
        "mixtral, the closest, has no moe.shared_ffn_hidden_size=1024"
    )


PUBLISHED = {  # config.json of the repositories named, as published, without what is not read
    # mistralai/Mistral-7B-v0.1
    "mistral_7b": {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    # Qwen/Qwen3-8B
    "qwen3_8b": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    # HuggingFaceTB/SmolLM3-3B
    "smollm3_3b": {
        "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 11008, "max_window_layers": 28,
        "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0,
        "sliding_window": None, "use_sliding_window": False, "vocab_size": 128256,
    },
    # ByteDance-Seed/Seed-OSS-36B-Base
    "seed_oss_36b": {
        "model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27648,
        "mlp_bias": False, "num_attention_heads": 80, "num_hidden_layers": 64,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0, "tie_word_embeddings": False, "vocab_size": 155136,
    },
    # Qwen/Qwen2-57B-A14B
    "qwen2_57b_a14b": {
        "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_act": "silu",
        "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28,
        "moe_intermediate_size": 2560, "norm_topk_prob": False, "num_attention_heads": 28,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 20480,
        "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    # bigcode/starcoder2-3b
    "starcoder2_3b": {
        "model_type": "starcoder2", "activation_function": "gelu_pytorch_tanh",
        "attention_dropout": 0.1, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072, "intermediate_size": 12288, "mlp_type": "default",
        "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24,
        "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1,
        "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True,
        "vocab_size": 49152,
    },
    # nvidia/Minitron-4B-Base
    "minitron_4b": {
        "model_type": "nemotron", "attention_bias": False, "attention_dropout": 0.0,
        "head_dim": 128, "hidden_act": "relu2", "hidden_size": 3072, "intermediate_size": 9216,
        "mlp_bias": False, "norm_eps": 1e-05, "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rope_theta": 10000,
        "tie_word_embeddings": False, "vocab_size": 256000,
    },
    # EleutherAI/pythia-1b
    "pythia_1b": {
        "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 2048,
        "intermediate_size": 8192, "layer_norm_eps": 1e-05, "num_attention_heads": 8,
        "num_hidden_layers": 16, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50304,
    },
    # microsoft/Phi-4-mini-instruct
    "phi4_mini": {
        "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "full_attn_mod": 1,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "attention_dropout": 0.0,
        "hidden_act": "silu", "hidden_size": 3072, "interpolate_factor": 1,
        "intermediate_size": 8192, "lm_head_bias": False, "max_position_embeddings": 131072,
        "mlp_bias": False, "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [
                          1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897,
                          1.956131817, 2.187582649, 2.446418898,
                          2.735880826, 3.059592084, 3.421605075,
                          3.826451687, 4.279200023, 4.785517845,
                          5.351743533, 5.984965424, 6.693110555,
                          7.485043894, 8.370679318, 9.36110372,
                          10.4687158, 11.70738129, 13.09260651,
                          14.64173252, 16.37415215, 18.31155283,
                          20.47818807, 22.90118105, 25.61086418,
                          28.64115884, 32.03, 32.1, 32.13, 32.23,
                          32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
                          32.93, 32.97, 33.28, 33.49, 33.5, 44.16,
                          47.77]},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    # ibm-granite/granite-3.3-8b-base
    "granite3_8b": {
        "model_type": "granite", "attention_bias": False, "attention_dropout": 0.0,
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12800, "logits_scaling": 16.0,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True,
        "vocab_size": 49159,
    },
    # ibm-granite/granite-3.1-1b-a400m-base
    "granite3_1b_a400m": {
        "model_type": "granitemoe", "attention_bias": False, "attention_dropout": 0.0,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 512, "logits_scaling": 6.0,
        "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1500000,
        "tie_word_embeddings": True, "vocab_size": 49155,
    },
    # google/gemma-3-27b-pt, its text_config
    "gemma3_27b": {
        "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376,
        "intermediate_size": 21504, "num_attention_heads": 32, "num_hidden_layers": 62,
        "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "rms_norm_eps": 1e-6,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        "vocab_size": 262208,
    },
    # moonshotai/Kimi-K2-Base
    "kimi_k2": {
        "model_type": "kimi_k2", "attention_bias": False, "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                         "type": "yarn"},
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "v_head_dim": 128, "vocab_size": 163840,
    },
    # zai-org/GLM-4.7-Flash
    "glm4_7_flash": {
        "model_type": "glm4_moe_lite", "attention_bias": False, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240,
        "kv_lora_rank": 512, "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20,
        "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
        "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.8, "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
    },
    # zai-org/GLM-4.5-Air
    "glm4_5_air": {
        "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
        "vocab_size": 151552,
    },
    # MiniMaxAI/MiniMax-M2
    "minimax_m2": {
        "model_type": "minimax_m2", "attn_type_list": [1] * 62, "head_dim": 128,
        "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
        "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1,
        "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
        "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
        "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000,
        "rotary_dim": 64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
        "sliding_window": None, "tie_word_embeddings": False, "use_mtp": True,
        "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    },
    # baidu/ERNIE-4.5-21B-A3B-PT
    "ernie4_5_21b_a3b": {
        "model_type": "ernie4_5_moe", "hidden_act": "silu", "hidden_size": 2560,
        "intermediate_size": 12288, "moe_capacity": [64, 64, 64], "moe_gate": "topk",
        "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 27,
        "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424,
        "auto_map": {"AutoModelForCausalLM": "modeling_ernie4_5_moe.Ernie4_5_MoeForCausalLM"},
    },
    # meta-llama/Meta-Llama-3-8B
    "llama3_8b": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
        "attention_bias": False, "pretraining_tp": 1,
    },
    # mistralai/Mixtral-8x7B-v0.1
    "mixtral_8x7b": {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    # Qwen/Qwen3-30B-A3B
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    # deepseek-ai/DeepSeek-V2-Lite
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2", "attention_bias": False, "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10944, "kv_lora_rank": 512, "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                         "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
                         "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
        "v_head_dim": 128, "vocab_size": 102400,
    },
    # openai/gpt-oss-20b
    "gpt_oss_20b": {
        "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                         "original_max_position_embeddings": 4096, "truncate": False},
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "vocab_size": 201088,
    },
    # deepseek-ai/DeepSeek-V3
    "deepseek_v3_like": {
        "model_type": "deepseek_v3", "attention_bias": False, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                         "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "v_head_dim": 128, "vocab_size": 129280,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
                                "quant_method": "fp8", "weight_block_size": [128, 128]},
    },
}  # fmt: skip


@pytest.mark.every(4)
@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_numbers(preset: str, tmp_path: Path):
    (tmp_path / CONFIG_JSON).write_text(json.dumps(PUBLISHED[preset]))
    ours = load(f"model={preset}").model
    assert list(differences(ours, TheirModel.read(tmp_path, KEY).model)) == []


def quantised(tensors: dict[str, Tensor]) -> None:
    """Experts and projections as DeepSeek-V3 has them: FP8 with a scale per block of 16 × 16."""
    for name in [name for name in tensors if "proj" in name]:
        rows, columns = tensors[name].shape
        scales = torch.rand(-(-rows // 16), -(-columns // 16)) + 0.5
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales


def test_fp8_weights_are_multiplied_by_scales_of_their_blocks(tmp_path: Path):
    save_random("deepseek_v3", tmp_path)
    edit_tensors(tmp_path, quantised)
    how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    edit_config(tmp_path, quantization_config=how)
    files = Pretrained(tmp_path, KEY).files
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    whole = files.read(name, ((0, 36), (0, 32)))
    plain, scales = (files._slice(each)[:] for each in (name, f"{name}_scale_inv"))
    for row, column in ((0, 0), (15, 16), (16, 15), (35, 31)):
        expected = float(plain[row, column]) * float(scales[row // 16, column // 16])
        assert float(whole[row, column]) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(files.read(name, ((5, 35), (3, 20))), whole[5:35, 3:20])
    # and as weights of a model
    own = loaded(tmp_path).state_dict()
    assert torch.equal(own["layers.1.attn.kv_a.weight"], whole)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path):
    _, ours = save_random("deepseek_v3", tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(2)}))
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.eh_proj\.weight is unknown"):
        loaded(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    assert list(differences(loaded(tmp_path).model, ours)) == []


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3", "mixtral stacked"])
@pytest.mark.parametrize(("tp", "ep", "etp"), [(2, 1, 1), (1, 4, 1), (1, 2, 2), (2, 2, 2)])
def test_a_rank_reads_its_part_and_no_more(
    name: str, tp: int, ep: int, etp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if name == "qwen3" and tp == 2:
        name = "llama"  # an even number of heads
    family, _, stacked = name.partition(" ")
    save_random(family, tmp_path, per_expert=not stacked)
    whole = loaded(tmp_path)
    found = Pretrained(tmp_path, KEY)
    read = 0
    plain = found.files.read

    def counting(tensor: str, region: Any) -> Tensor:
        nonlocal read
        part = plain(tensor, region)
        read += part.numel()
        return part

    monkeypatch.setattr(found.files, "read", counting)
    coords = ShardCoords((tp - 1, tp), (ep // 2, ep), (etp - 1, etp))
    for named, values in whole.weights():
        part = torch.full(coords.shape(named.weight), torch.nan)
        found.fill([(named, part)], coords)
        block = coords.block(named.weight)
        box = tuple(map(slice, block.start, block.stop))
        expected = values.detach().view(named.weight.shape)[box].reshape(part.shape)
        assert torch.equal(part, expected), named.name
        assert read == part.numel()
        read = 0
