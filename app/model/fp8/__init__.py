"""FP8 GEMMs of linear layers and experts: quantised matrices, quantizers, back ends."""
