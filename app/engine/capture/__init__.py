"""CUDA graphs: what is recorded once and replayed in every step after it."""
