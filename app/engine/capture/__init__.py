"""CUDA graphs: capture once, replay in every later step."""
