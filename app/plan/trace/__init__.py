"""The model's operations with sizes in place of tensors, from which memory is counted."""
