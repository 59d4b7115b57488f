"""Measure the speeds of a GPU, its host and its links, for planned times."""
