"""One step on this rank: its actions, the microbatches in flight, and what ranks exchange."""
