"""Models in and out of a run: export to Hugging Face folders, import as checkpoints."""
