"""One step of a rank: executor, microbatches in flight, transport, update, reruns."""
