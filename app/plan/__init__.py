"""Everything about a run that can be computed before the first kernel, as pure values."""
