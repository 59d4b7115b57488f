"""Experts of other ranks in spare slots of this one: weights go out, gradients home."""
