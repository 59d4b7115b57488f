"""From an exception while composing to one line that a person can act on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException, ValidationError

from app.cli.compose import all_keys, default_of
from app.errors import ConfigError, OwnError, nearest

_NULL_SECTION = "Unexpected type for root"  # OmegaConf's assertion when an override reaches below a null section
RESUMABLE = "stopped; resume=auto continues from the newest checkpoint, if one was saved"


@contextmanager
def readable_errors(program: str, speak: bool, when_stopped: str = "stopped") -> Iterator[None]:
    """Turn a mistake in the configuration into one line on stderr (where `speak`) and exit code 2; Ctrl-C likewise, 130."""
    try:
        yield
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        message = explain(error)
        speak = speak or isinstance(error, OwnError)
    except AssertionError as error:
        if _NULL_SECTION not in str(error):
            raise
        message = "an override reaches into a section that is null; a dense model has no model.moe: choose a model with experts"
    except KeyboardInterrupt:
        if speak:
            print(f"\n{program}: {when_stopped}", file=sys.stderr)
        sys.exit(130)  # as a shell reports an interrupt
    else:
        return
    if speak:
        print(f"{program}: {message}", file=sys.stderr)
    sys.exit(2)


def explain(error: Exception) -> str:
    """What was wrong, where, and the nearest key, option or value that works."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _explain_option(error)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key, value = _override(str(error))
    key = getattr(cause, "full_key", None) or key
    reason = re.sub(r"\s+", " ", str(cause).split("\n    full_key")[0]).strip()
    if key is None:
        return reason
    key = re.sub(r"\[\d+\]$", "", key)  # an element of a list
    if key not in all_keys():
        return str(ConfigError(key, value, "there is no such key", nearest(key, all_keys())))
    return _explain_value(key, reason) if isinstance(cause, ValidationError) else f"{key}: {reason}"


def _explain_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    options = list(error.options or ())
    return str(ConfigError(group, option, f"the options are {', '.join(options)}", nearest(option, options)))


_VALUE_RULES = (  # what OmegaConf says -> the value and the rule that it broke
    (r"Invalid value '(.*)', expected one of \[(.*)\]", "must be one of {}"),
    (r"Value '(.*)' of type '.*' could not be converted to (Integer|Float)", "must be {}"),
    (r"Value '(.*)' is not a valid (bool)", "must be {}"),
)
_TYPES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def _explain_value(key: str, reason: str) -> str:
    for pattern, rule in _VALUE_RULES:
        if match := re.match(pattern, reason):
            value, expected = match.groups()
            near = _nearest_value(value, expected) or _typed(default_of(key))
            return str(ConfigError(key, value, rule.format(_TYPES.get(expected, expected)), near))
    return f"{key}: {reason}"


def _nearest_value(value: str, expected: str) -> object:
    number = re.match(r"-?\d+(\.\d+)?(e-?\d+)?", value)
    match expected:
        case "Integer" | "Float":
            exact = float(number.group()) if number else None
            return round(exact) if exact and expected == "Integer" else exact
        case "bool":
            return nearest(value.lower(), ["true", "false"])
        case _:
            return nearest(value, expected.split(", "))


def _override(message: str) -> tuple[str | None, str]:
    # Hydra's own advice repeats the override: "To append to your config use +key=value".
    if match := re.search(r"use \+([^=\s]+)=(\S*)", message):
        return match.group(1), match.group(2)
    match = re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^'=]+)", message)
    return (match.group(1).split("@")[0].lstrip("+~"), "") if match else (None, "")


def _typed(value: object) -> object:
    """A default as the user would type it."""
    return str(value).lower() if isinstance(value, bool) else value
