"""Documents to tokens to microbatches."""
