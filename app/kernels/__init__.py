"""Kernels for what lies between matrix products, and one product; every sum has a fixed order.

Every one has a plain torch version beside its caller, which runs where Triton or a GPU is missing;
what is missing is said when a run starts (`app.engine.fast_paths`).
"""
