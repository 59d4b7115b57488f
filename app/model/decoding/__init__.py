"""Decoding with KV caches, so that each new token costs one token's compute."""
