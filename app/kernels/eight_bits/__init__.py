"""Rows and weights of experts in eight bits, with a scale per row: for products on tensor cores."""
