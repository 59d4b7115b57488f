"""Tensor code of the transformer: layers, attention, blocks, chunks."""
