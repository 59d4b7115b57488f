"""Kernels that plan clones (expert replicas, `app.moe.clones`), reroute tokens and send weights."""
