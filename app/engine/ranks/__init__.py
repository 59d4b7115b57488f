"""Ranks of a run: where they meet, their process groups, decisions they agree on."""
