"""Sweeps: their combinations, jobs and record."""
