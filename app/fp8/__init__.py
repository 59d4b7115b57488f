"""FP8 GEMMs of linear layers and experts, wrapped around plain modules when a run is built."""
