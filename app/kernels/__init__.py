"""Triton kernels: mostly memory-bound operations between GEMMs; every sum has a fixed order.

Each has a plain torch version next to its caller, which runs without Triton or a GPU; a run reports
at its start which kernels are missing (`app.engine.fast_paths`).
"""
