"""Bytes that a GPU needs at its peak, by part."""
