"""Shards of every parameter on a rank, and the mapping of one layout's shards to another's."""
