"""Processes of this host: start ranks, end with the parent, temporary folders."""
