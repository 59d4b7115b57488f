"""Traces: the model's operations with sizes in place of tensors, from which memory and cost are
counted.
"""
