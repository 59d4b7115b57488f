"""Files of a run: its folder, metrics, list of checkpoints, and records of earlier attempts."""
