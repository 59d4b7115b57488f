"""Text from a model: prompts in one forward, then a token of every sequence per step."""
