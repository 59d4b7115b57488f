"""Attention: modules with weights, context parallelism, and the kernels that compute it."""
