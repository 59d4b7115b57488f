"""Kernels of plans of clones, and what they share."""
