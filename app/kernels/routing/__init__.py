"""Kernels of routers: the best experts, and scores in parts that tensor cores take."""
