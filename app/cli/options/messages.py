"""From an exception while composing to one line that a person can act on."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError
from yaml import YAMLError

from app.cli.options.compose import all_keys, default_of, like_key
from app.cli.options.trial import Trial, tried
from app.config.profile import PAIRS
from app.errors import ConfigError, FirstOf, Instead, OwnError, nearest

# OmegaConf's assertion when an override reaches below a null section
_NULL_SECTION = "Unexpected type for root"
_NO_SECTION = (
    "an override reaches into a section that is null: a dense model has no model.moe, and few have "
    "model.mla, model.yarn or model.llama3_rope; choose a model that has it"
)
PROFILE = "hardware.profile."
_MEASURE = "measure the GPU again: python -m app.cli.calibrate"
_IN_FILE = re.compile(r"In '([^']+)': (\w+) raised while composing config:\s*(.*)", re.DOTALL)
# what OmegaConf puts before what one of our resolvers raises
IN_RESOLVER = "ConfigError raised while resolving interpolation: "
# What a mistake raises while a configuration is composed.
COMPOSING = (ConfigError, HydraException, OmegaConfBaseException, YAMLError, AssertionError)
RESUMABLE = "stopped; resume=auto continues from the newest checkpoint, if one was saved"


@contextmanager
def readable_errors(
    program: str,
    speak: bool,
    when_stopped: str = "stopped",
    trial: Callable[[], Trial] | None = None,
    silent_s: float = 0.0,
) -> Iterator[None]:
    """Turn a mistake in the configuration into one line on stderr (where `speak`) and exit code 2.

    Ctrl-C likewise, 130. `trial` makes a trial of the configuration: what the line advises is
    tried. Who does not speak ends after `silent_s` seconds: launchers end all ranks once one has
    ended, and the one that speaks must not be cut off.
    """
    try:
        yield
    except COMPOSING as error:
        if isinstance(error, AssertionError) and _NULL_SECTION not in str(error):
            raise
        found = explained(error)
        speak = speak or isinstance(error, OwnError)
    except KeyboardInterrupt:
        if speak:
            print(f"\n{program}: {when_stopped}", file=sys.stderr)
        sys.exit(130)  # as a shell reports an interrupt
    else:
        return
    try:
        if speak:
            if trial is not None and isinstance(found, ConfigError) and found.alternatives:
                found = tried(found, trial())
            print(f"{program}: {found}", file=sys.stderr, flush=True)
        else:
            time.sleep(silent_s)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2)


def trial_of(load: Callable[[Sequence[str]], object]) -> Trial:
    """The trial that loads a configuration with the overrides that it is given."""

    def trial(overrides: Sequence[str]) -> ConfigError | None:
        try:
            load(overrides)
        except COMPOSING as error:
            found = explained(error)
            if isinstance(found, ConfigError):
                return found
            return ConfigError("configuration", "", str(found))
        return None

    return trial


def explained(error: Exception) -> Exception:
    """What was wrong, where, and what may work instead; a ConfigError where the key is known."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, AssertionError):
        return ValueError(_NO_SECTION)
    if isinstance(error, YAMLError):
        return ValueError("no YAML: " + re.sub(r"\s+", " ", str(error)))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _explained_option(error)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key, value = _override(str(error))
    said, _, rest = str(cause).partition("\n    full_key: ")
    in_file = _IN_FILE.match(said)
    # of a value in a file Hydra keeps the words alone
    named = rest.partition("\n")[0] if in_file else None
    key = getattr(cause, "full_key", None) or named or key
    reason = re.sub(r"\s+", " ", in_file[3] if in_file else said).strip()
    if key is None:
        return ValueError(reason.removeprefix(IN_RESOLVER))
    key = re.sub(r"\[\d+\]$", "", key)  # an element of a list
    found = _explained_reason(key, value, reason, cause)
    if in_file and isinstance(found, ConfigError):
        return ConfigError(
            key,
            found.value,
            f"{found.rule}, in {in_file[1]}",
            found.nearest,
            guess=found.guess,
            advice=found.advice,
        )
    return found


def _explained_reason(key: str, value: str, reason: str, cause: BaseException) -> Exception:
    if key not in all_keys():
        return _explained_key(key, value, reason)
    if isinstance(cause, MissingMandatoryValue):
        advice = _MEASURE if key.startswith(PROFILE) else None
        return ConfigError(key, None, "must have a value", advice=advice)
    # of what is in a file Hydra tells the kind of an error in words
    if not isinstance(cause, ValidationError | ConfigCompositionException):
        return ValueError(f"{key}: {reason}")
    return _explained_value(key, value, reason)


def _explained_key(key: str, value: str, reason: str) -> ConfigError:
    if "default list use +" in reason:
        return ConfigError(
            key,
            value,
            "is no part of every run, so it is added",
            nearest=Instead(f"+{key}={value}"),
        )
    return ConfigError(key, value, "there is no such key", guess=like_key(key))


def _explained_option(error: MissingConfigException) -> ConfigError:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    options = list(error.options or ())
    return ConfigError(
        group, option, f"the options are {', '.join(options)}", guess=nearest(option, options)
    )


_VALUE_RULES = (  # what OmegaConf says -> the value and the rule that it broke
    (r"Invalid value '(.*)', expected one of \[(.*)\]", "must be one of {}"),
    (r"Value '(.*)' of type '.*' could not be converted to (Integer|Float)", "must be {}"),
    (r"Value '(.*)' is not a valid (bool)", "must be {}"),
)
_TYPES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def _explained_value(key: str, value: str, reason: str) -> Exception:
    if "is not Optional" in reason:
        advice = _MEASURE if key.startswith(PROFILE) else None
        return ConfigError(key, None, "must have a value", nearest=default_of(key), advice=advice)
    if "is not a ListConfig" in reason:
        pair = key.startswith(PROFILE) and key.removeprefix(PROFILE) in PAIRS
        rule = "must be a pair, of forward and backward" if pair else "must be a list"
        listed = f"[{value},{value}]" if pair else f"[{value}]"
        # in a file the value is not told
        return ConfigError(key, value or "…", rule, nearest=listed if value else None)
    if match := re.match(r"Invalid type assigned: .*value: (.*)", reason):
        rule = f"is a section, of which {key}.NAME=VALUE sets a key"
        return ConfigError(key, match.group(1), rule, nearest=(None,))
    for pattern, rule in _VALUE_RULES:
        if match := re.match(pattern, reason):
            value, expected = match.groups()
            said = rule.format(_TYPES.get(expected, expected))
            if expected not in ("Integer", "Float"):
                known = ["true", "false"] if expected == "bool" else expected.split(", ")
                return ConfigError(key, value, said, guess=nearest(value, known))
            near = FirstOf((*_numbers(value, expected), default_of(key)))
            return ConfigError(key, value, said, nearest=near)
    return ValueError(f"{key}: {reason}")


def _numbers(value: str, expected: str) -> list[float]:
    """The number that a text begins with."""
    number = re.match(r"-?\d+(\.\d+)?(e-?\d+)?", value)
    if number is None:
        return []
    return [round(float(number.group())) if expected == "Integer" else float(number.group())]


def _override(message: str) -> tuple[str | None, str]:
    # Hydra's own advice repeats the override: "To append to your config use +key=value".
    if match := re.search(r"(?:use \+|merging override )([^=\s]+)=(\S*)", message):
        return match.group(1), match.group(2)
    match = re.search(
        r"Could not (?:override|append to config|delete from config)[^']*'([^'=]+)", message
    )
    return (match.group(1).split("@")[0].lstrip("+~"), "") if match else (None, "")
