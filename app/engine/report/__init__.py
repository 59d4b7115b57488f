"""Reporting of a run: metrics, sinks, plots, the live line, opening and summary."""
