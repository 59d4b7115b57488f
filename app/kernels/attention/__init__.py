"""Kernels between the qkv projection and attention."""
