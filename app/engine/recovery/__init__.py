"""Copies of the ranks' state in memory, and a new meeting of ranks after one has died."""
