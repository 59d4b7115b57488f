"""Start a program's ranks: settle its configuration, launch processes, run in each."""
