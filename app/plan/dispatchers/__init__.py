"""Planned dispatchers: one pure record for each transport of tokens to experts."""
