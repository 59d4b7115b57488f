"""The command-line programs, and the bridge from Hydra's YAML to the typed configuration."""
