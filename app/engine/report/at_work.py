"""Threads in which experiment trackers work, seen by programs that do not load the trackers."""

import threading

THREAD = "tracker"  # their name


def trackers_at_work() -> bool:
    """Return whether a tracker has not finished: its package may hold up the end of the process."""
    return any(thread.name == THREAD for thread in threading.enumerate())
