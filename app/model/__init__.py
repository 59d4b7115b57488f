"""Tensors of the transformer: layers, attention, blocks, chunks."""
