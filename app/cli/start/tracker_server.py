"""Ask the server of an experiment tracker at the start of a run whether it answers.

MLflow's client tries a request for minutes, and only after the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from http.client import HTTPException
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from app.config import Run
from app.errors import warn

URI = "MLFLOW_TRACKING_URI"
# variables by which a user tells MLflow how long to try: then it is left to that
PATIENCE = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")
CONNECT_S = 5.0
GATEWAY = (502, 503, 504)  # codes of a proxy whose server does not answer


def absent_trackers(run: Run, env: Mapping[str, str], seconds: float = CONNECT_S) -> frozenset[str]:
    """Return the trackers of a run whose server does not answer in time, with a warning for each;
    the run does without them.
    """
    uri = env.get(URI, "")
    if not run.log.mlflow or any(name in env for name in PATIENCE):
        return frozenset()
    why = unreachable(uri, seconds) if uri.startswith(("http://", "https://")) else None
    if why is None:
        return frozenset()
    place = urlsplit(uri).netloc.rpartition("@")[2]  # without a password
    told = f"MLflow could not start ({URI}: {place} does not answer: {why})"
    warn(f"{told}; metrics.jsonl has all metrics")
    return frozenset({"MLflow"})


def unreachable(uri: str, seconds: float) -> str | None:
    """Return why no connection to a server is made, through the user's proxy if there is one; None
    if it answers anything, or slowly.
    """
    parts = urlsplit(uri)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    try:
        urlopen(f"{plain.geturl().rstrip('/')}/health", timeout=seconds).close()
    except HTTPError as answer:
        answer.close()
        # others, such as 401, are MLflow's: it logs in
        return f"{answer.code} {answer.reason}" if answer.code in GATEWAY else None
    except URLError as error:  # while connecting
        if isinstance(error.reason, SSLError):
            return None  # MLflow may be told of other certificates
        return str(getattr(error.reason, "strerror", None) or error.reason)
    except (OSError, HTTPException, ValueError):
        pass  # it broke off after connecting, or the URI is none: MLflow says more
    return None
