"""A run's plan: everything that follows from its configuration, and how it is written down."""
