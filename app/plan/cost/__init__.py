"""Floating-point operations, and what groups of ranks send."""
