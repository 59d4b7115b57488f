"""Hangs are named: what ranks are in, which have not come, and for how long."""
