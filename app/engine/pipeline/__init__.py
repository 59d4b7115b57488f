"""One step on this rank: its actions, microbatches in flight, and P2P between stages."""
