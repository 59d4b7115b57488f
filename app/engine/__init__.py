"""Processes: groups, executor, checkpoints, reports, and the trainer that joins them."""
