"""Layers that remember keys and values, so that a token costs one token's work."""
