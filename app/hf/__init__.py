"""Hugging Face checkpoints: read at any layout, written from ours."""
