"""Whether the Hugging Face hub can be reached."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

REACH_S = 4.0  # seconds for a connection to the hub


def go_offline_without_network() -> None:
    """Without the hub, let the libraries take what their caches hold, and fail at once. They would
    retry for half a minute.

    Behind a proxy nothing is asked: only the library knows the way.
    """
    import datasets  # takes a second

    if constants.HF_HUB_OFFLINE or getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=REACH_S).close()
    except OSError:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
