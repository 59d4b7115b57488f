"""Hugging Face checkpoints: read into any layout, and written from our weights."""
