"""Inference: prefill prompts in one forward, then decode a token of every sequence per step."""
