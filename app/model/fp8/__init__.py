"""Products of linear layers in eight bits: matrices, what quantises them, and their back end."""
