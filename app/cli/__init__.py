"""Commands and the bridge from YAML to typed configuration."""
