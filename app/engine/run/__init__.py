"""Life of a run from start to end: folder, restarts, signals, agreement of ranks."""
