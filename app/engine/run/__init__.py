"""A run from its start to its end: folder, attempts, signals, what ranks agree on."""
