"""AdamW on contiguous buffers, sharded over data-parallel ranks."""
