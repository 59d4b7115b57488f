"""Tables and pictures of a plan."""
