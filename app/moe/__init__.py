"""Mixture of experts: routing, permutation, experts, and their transport between ranks."""
