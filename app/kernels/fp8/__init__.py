"""Rows and weights of experts in FP8, with a scale per row: for products on tensor cores."""
