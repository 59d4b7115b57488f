"""Kernels that quantise experts' rows and weights to FP8 with a scale per row, for grouped
GEMMs.
"""
