"""Turn typed arguments into a checked configuration, or a mistake into one line."""
