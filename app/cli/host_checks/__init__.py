"""Checks of a host, and of several together, before a run."""
