"""Each part of the model as traced operations: what it computes, saves and sends."""
