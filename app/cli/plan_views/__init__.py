"""A plan as tables and pictures."""
