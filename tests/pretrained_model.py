"""A Hugging Face folder of a small random model with a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.hf_folders import transformers
from tests.tensors.hf_weights import spread_weights

CONTEXT = 64
MARKER = "<|endoftext|>"
TEXT = "the cat sat on the mat and the dog ate that hat " * 3


def save_pretrained(folder: Path, experts: int) -> None:
    """Mixtral with so many experts, or Llama without; tokens are bytes and a few joined ones."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 280,
        "max_position_embeddings": CONTEXT,
    }
    torch.manual_seed(5)
    if experts:
        config = transformers.MixtralConfig(**sizes, num_local_experts=experts, sliding_window=None)
        model = transformers.MixtralForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    spread_weights(model)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_trained_tokenizer(), eos_token=MARKER, pad_token=MARKER
    )
    tokenizer.save_pretrained(folder)


def _trained_tokenizer() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=[MARKER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator([TEXT], trainer)
    return found
