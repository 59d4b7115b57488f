"""Checkpoints: saved by all ranks, loaded at any layout, chosen when a run resumes."""
