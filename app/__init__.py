"""Graphfold: plan, build and train dense and mixture-of-experts language models."""

__version__ = "0.1.0"
