"""Products in FP8 of linear layers and experts: matrices, what quantises them, back ends."""
