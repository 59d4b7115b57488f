"""Token dispatchers, one module each."""
