"""Processes of this host: starting ranks, ending with their parent, folders for the time being."""
