"""A report of runs: the facts of each, and one page."""
