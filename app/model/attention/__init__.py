"""Attention: modules with their weights, whole sequences over ranks, kernels that compute it."""
