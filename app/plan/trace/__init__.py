"""Traces: the model's operations with sizes in place of tensors, to count memory and cost."""
