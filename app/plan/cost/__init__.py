"""Floating-point operations, communication volumes and times."""
