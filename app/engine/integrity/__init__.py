"""Replays of microbatches and comparisons of weights, which find silent data corruption."""
