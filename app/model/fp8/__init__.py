"""Products in eight bits of linear layers and experts: matrices, what quantises them, back ends."""
