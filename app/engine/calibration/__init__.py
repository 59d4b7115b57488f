"""Measures what a GPU, its host and its links reach, for planned times."""
