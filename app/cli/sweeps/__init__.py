"""Sweeps: combinations, jobs and the record sweep.json."""
