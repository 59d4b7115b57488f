"""Transport of tokens to experts, one module per dispatcher."""
