"""Translate exceptions of Hydra and OmegaConf into ConfigError: key and value as typed, the rule,
and what may work instead.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from math import inf, isfinite
from traceback import walk_tb
from types import NoneType
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from app.cli.options.arguments import key_of
from app.cli.options.compose import SAVED
from app.cli.options.keys import all_keys, default_of, is_section, type_of
from app.cli.options.other_names import row_of
from app.cli.options.unknown import like_key, no_such_key, refused_value
from app.cli.processes.home import CONF
from app.config.profile import PAIRS
from app.errors import ConfigError, FirstOf, Instead, nearest, nearest_model
from app.errors import typed as as_typed
from app.programs import command_name, speaker
from app.shell import shell_word

# what OmegaConf puts before what one of our resolvers raises
IN_RESOLVER = "ConfigError raised while resolving interpolation: "
# What OmegaConf asserts, and Hydra raises, without a class of its own: an override below a null
# section; a number where an option is chosen.
_PLAIN = ("Unexpected type for root", "Config group override must be")
# What a mistake may raise while a configuration is composed.
COMPOSING = (HydraException, OmegaConfBaseException, YAMLError, AssertionError, ValueError)
PROFILE = "hardware.profile."
NOT_TOLD = "…"
OF_SAVED = "the settings of the run that is to continue"
SWEEP = r"(?:Ambiguous value for argument|Sweep parameters) '"


def is_mistake(error: Exception) -> bool:
    """Return whether an exception of COMPOSING is a mistake of the user's."""
    if isinstance(error, ConfigError | HydraException | OmegaConfBaseException | YAMLError):
        return True
    return str(error).startswith(_PLAIN)


def explained(error: Exception) -> Exception:
    """Return the exception to show: a ConfigError if the key is known, else a ValueError."""
    match error:
        case ConfigError():
            return error
        case YAMLError():
            return ValueError("no YAML: " + re.sub(r"\s+", " ", str(error)))
        case OverrideParseException():
            return _unreadable(error.override)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _explained_option(error)
    override = _override(error)
    if override is not None and str(error).startswith(_PLAIN):
        below_null = isinstance(error, AssertionError)
        return _below_null(override) if below_null else _no_option(override)
    if match := re.match(SWEEP + "(.*)'", str(error)):
        return _several(match[1])
    if match := re.search(r"default list use \+([^=\s]+)=(\S*)", str(error)):
        return _not_added(match[1], match[2])
    if override is not None and "An item is already at" in str(error.__cause__ or error):
        key, value = override.key_or_group, _value(str(override.input_line))
        near = Instead(f"{key}={value}")
        return ConfigError(f"+{key}", value, "is in every run already", nearest=near)
    match = re.match(r"Multiple values for (\S+)\. To override", str(error))
    if match and (added := _typed_choice(error, match[1])) is not None:
        value = _value(str(added.input_line))
        near = Instead(f"{match[1]}={value}")
        return ConfigError(f"+{match[1]}", value, "is in every run already", nearest=near)
    return _of_composed(error, override)


def _override(error: Exception) -> Override | None:
    """Return the override that Hydra was applying, from its frames: few of its messages hold it
    whole.
    """
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        local = frame.f_locals.get("override")
        found = local if isinstance(local, Override) else found
    return found


def _value(override: str) -> str:
    return override.partition("=")[2]


def _two_overrides(value: str) -> bool:
    """Return whether a value holds further overrides, as `10 optim.lr=1` does."""
    others = [word.partition("=") for word in value.split()[1:]]
    return bool(others) and all(equals and _known(name.lstrip("+~")) for name, equals, _ in others)


def _known(name: str) -> bool:
    return name in all_keys() or bool(_options(name))


def _unreadable(override: str) -> ConfigError:
    """Return the error for an override that Hydra's grammar rejects."""
    key, equals, value = override.partition("=")
    name = key.lstrip("+~")
    if not equals or not key:
        return _no_override(override)
    if not _known(name):
        return no_such_key(name, value)
    if re.fullmatch(r"[^(){}\[\]'\"]+,", value) and (one := value.rstrip(", ")):
        return ConfigError(key, value, "ends with a comma", nearest=one)
    if _two_overrides(value):
        rule = "holds several overrides in one word"
        return ConfigError(key, value, rule, advice=f"type {override}, without quotes around it")
    rule = "cannot be read: a bracket or quote is open, or something is typed that needs quotes"
    bare = re.sub(r"^[='\"\[({ ]+|[='\"\])} ,]+$", "", value)
    if bare == value and (_kind(name) is str or name == "data.path"):
        return ConfigError(key, value, rule, advice=f"type {shell_word(key, value)}")
    usual = () if is_section(name) else (_usual(name),)
    near = FirstOf(each for each in (bare, *usual) if each not in ("", None))
    return ConfigError(key, value, rule, nearest=near)


def _no_override(word: str) -> ConfigError:
    """Return the error for a word that is not key=value."""
    name = word.strip("=:").lstrip("+~")
    rule = "is no key=value"
    if is_section(name):
        return _no_section("override", word, name)
    if name in all_keys():
        rule += " (no spaces around =)"
        near = None if _usual(name) is None else Instead(f"{name}={as_typed(_usual(name))}")
        return ConfigError("override", word, rule, nearest=near)
    before, colon, value = name.partition(":")
    if colon and value and before in all_keys():
        return ConfigError("override", word, rule, nearest=Instead(f"{before}={value.strip()}"))
    row = row_of(name)
    guess = None if row is None else row.key
    return ConfigError("override", word, rule, guess=guess or like_key(name))


def _measure_again() -> str:
    return f"measure the GPU again: {command_name('calibrate')}"


def _several(override: str) -> ConfigError:
    """Return the error for several values of a key without -m."""
    key, value = key_of(override), _value(override)
    listed = [] if "(" in value else value.split(",")
    rule = f"is for a sweep over several values ({speaker('train')} -m)"
    takes_list = typing.get_origin(type_of(key)) is tuple or key == "data.path"
    if _kind(key) is float and re.fullmatch(r"\d+,\d+", value):
        point = value.replace(",", ".")
        return ConfigError(key, value, "a decimal has a point, not a comma", nearest=point)
    near = (*([f"[{','.join(listed)}]"] if takes_list and listed else listed), _usual(key))
    return ConfigError(key, value, rule, nearest=FirstOf(each for each in near if each is not None))


def _below_null(override: Override) -> ConfigError:
    """Return the error for a key below a section that is null here."""
    key, value = override.key_or_group, _value(str(override.input_line))
    section = key.rpartition(".")[0]
    rule = f"needs {section}, which is null here"
    advice = f"choose an option of {section.partition('.')[0]} that has it"
    return ConfigError(key, value, rule, advice=advice)


def _no_option(override: Override) -> ConfigError:
    """Return the error for a number in place of a group's option."""
    group = override.key_or_group
    options = _options(group)
    if not options:
        return ConfigError("override", override.input_line, "is no key=value")
    rule = f"the options are {', '.join(options)}"
    value = _value(str(override.input_line))
    return refused_value(group, value, rule, _like_option(group, value, options))


def _like_option(group: str, word: str, options: Sequence[str]) -> str | None:
    """Return the option that a word may misspell; the name of a model family stands for its only
    size.
    """
    if group != "model":
        return nearest(word, options)
    size = re.compile(rf"{re.escape(word)}(?!(?<=\d)\d)")  # llama3 is no beginning of llama31
    family = [name for name in options if size.match(name)]
    return nearest_model(word, options) or (nearest(word, family) if family else None)


def _options(group: str) -> list[str]:
    """Return the options of a group in conf/."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml")) if group else []


def _explained_option(error: MissingConfigException) -> ConfigError:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    options = list(error.options or _options(group))
    found = _typed_choice(error, group)
    rule = f"the options are {', '.join(options)}"
    if found is None or not isinstance(chosen := found.value(), list):
        return refused_value(group, option, rule, _like_option(group, option, options))
    close = (_like_option(group, str(each), options) for each in chosen)
    near = FirstOf(dict.fromkeys(each for each in close if each))
    return ConfigError(group, _value(str(found.input_line)), f"one is chosen; {rule}", nearest=near)


def _typed_choice(error: Exception, group: str) -> Override | None:
    """Return the typed choice for a group: Hydra's error names only one option of a list."""
    for frame, _ in walk_tb(error.__traceback__):
        for each in frame.f_locals.get("parsed_overrides") or ():
            if isinstance(each, Override) and each.key_or_group == group:
                return each
    return None


def _of_composed(error: Exception, override: Override | None) -> Exception:
    """Return the error for a value or key that OmegaConf rejects, typed or from a file."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause)
    said = text.partition("\n    full_key")[0]
    reason = re.sub(r"\s+", " ", re.sub(r"^In '.*raised while composing config:", "", said)).strip()
    at = re.search(r"\n    full_key: (\S+)", text)
    # an element of a list counts as the list
    key = re.sub(r"\[\d+\]$", "", at[1]) if at else None
    typed = None if override is None else _value(str(override.input_line))
    if unset := re.search(r"Environment variable '(.+?)' not found", reason):
        return _unset(key or "configuration", unset[1])
    if missing := re.search(r"Interpolation key '(.+?)' not found", reason):
        rule = f"there is no key {missing[1]} that it could refer to"
        return ConfigError(key or "configuration", f"${{{missing[1]}}}", rule)
    if override is not None and override.key_or_group.startswith("hydra."):
        return _of_hydra(override, key or "", reason, beside=getattr(cause, "parent_node", None))
    if override is not None and key not in all_keys():
        return _explained_key(override, key or "")
    if key is None:
        return ValueError(reason.removeprefix(IN_RESOLVER))
    file = re.match("In '(.*)':", str(error))
    if key not in all_keys():
        where = f", in {file[1]}.yaml" if file else ""
        return no_such_key(key, "", where)
    if "does not support deletion" in reason or "Could not delete" in reason:
        rule = "takes away a key that every run has"
        return ConfigError("override", f"~{key}", rule, advice="leave it away")
    same = override is not None and override.key_or_group == key
    given = override.value() if override is not None and same else None
    found = _explained_value(key, reason, typed if same else None, given=given)
    if file is None:
        return found
    return _in_file(found, OF_SAVED if file[1] == SAVED else f"{file[1]}.yaml")


def _of_hydra(override: Override, wrong: str, reason: str, beside: object) -> ConfigError:
    """Return the error for a key of Hydra's own, or for a value of one. `wrong` is the beginning of
    the key that is no section, and `beside` the section with the keys that it may misspell.
    """
    key, value = override.key_or_group, _value(str(override.input_line))
    section, _, name = wrong.rpartition(".")
    if not isinstance(beside, DictConfig) or name in beside:
        return ConfigError(key, value, reason)
    guess = nearest(name, [str(each) for each in beside])
    meant = f"{section}.{guess}{key.removeprefix(wrong)}" if guess else None
    advice = None if guess else f"{command_name('train')} --cfg hydra prints the keys"
    return ConfigError(key, value, "there is no such key", guess=meant, advice=advice)


def _unset(key: str, variable: str) -> ConfigError:
    """Return the error for a reference to an unset environment variable."""
    rule = f"the environment variable {variable} is not set"
    advice = f"set it, or type ${{oc.env:{variable},DEFAULT}}"
    return ConfigError(key, f"${{oc.env:{variable}}}", rule, advice=advice)


def _in_file(error: ConfigError, file: str) -> ConfigError:
    """Return the error as one in a file, where overrides do not help: files are read first."""
    near = [as_typed(each.candidates[0]) for each in error.alternatives]
    guess = near[0] if near else error.guess
    return ConfigError(error.key, error.value, f"{error.rule}, in {file}", guess=guess)


def _not_added(key: str, value: str) -> ConfigError:
    """Return the error for a group that needs `+`."""
    if value not in _options(key):
        rule = f"is added as +{key}=NAME; the options are {', '.join(_options(key))}"
        return ConfigError(key, value, rule)
    near = Instead(f"+{key}={value}")
    return ConfigError(key, value, "is no part of every run, so it is added", nearest=near)


def _explained_key(override: Override, key: str) -> ConfigError:
    # below a typed key there may be a dictionary, as in model={a:1}
    whole = override.key_or_group
    inner = key.startswith(f"{whole}.")
    named = key if inner else whole
    value = "" if inner else _value(str(override.input_line))
    return no_such_key(named, value)


def _explained_value(key: str, reason: str, typed: str | None, *, given: object) -> ConfigError:
    """Return the error for a value of the wrong type. `typed` is None if it comes from a file."""
    if "is not Optional" in reason:
        if key.startswith(PROFILE):
            return ConfigError(key, None, "must have a value", advice=_measure_again())
        return ConfigError(key, None, "must have a value", nearest=_usual(key))
    if "missing mandatory value" in reason:
        advice = _measure_again() if key.startswith(PROFILE) else None
        return ConfigError(key, None, "must have a value", advice=advice)
    value = _told(reason) if typed is None else typed
    if is_section(key):
        return _no_section(key, value, key)
    kind = _kind(key)
    texts = [str(each) for each in given] if isinstance(given, list) else [str(given or value)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [str(each.value) for each in kind]
        return _no_choice(key, value, texts, names=names, several=isinstance(given, list))
    if kind is bool:
        return ConfigError(key, value, "must be true or false", guess=nearest(value, BOOLS))
    if _takes_list(key):
        return _no_list(key, value, one=not isinstance(given, list | dict))
    if kind in (int, float):
        return _no_number(key, value, texts, whole=kind is int)
    rule = "must be a list" if kind is Any else "must be one text"
    return ConfigError(key, value, rule, nearest=default_of(key))


BOOLS = ("true", "false")


def _no_list(key: str, value: str, one: bool) -> ConfigError:
    """Return the error for a value in place of a list or pair."""
    rule, listed = "must be a list of texts", f"[{value}]"
    if key.startswith(PROFILE) and key.removeprefix(PROFILE) in PAIRS:
        rule, listed = "must be a pair, of forward and backward", f"[{value},{value}]"
    elif _kind(key) is float:
        rule = "must be a list of numbers"
    near = (listed,) if one and value not in ("", NOT_TOLD) else ()
    return ConfigError(key, value, rule, nearest=near)


def _told(reason: str) -> str:
    """Return the value that OmegaConf's message quotes, NOT_TOLD if it quotes none."""
    found = re.match(
        r"(?:Invalid v|V)alue (?!assigned)'?(.+?)'?(?: of type | is not a |, expected )", reason
    ) or re.match(r"Invalid type assigned: .* value: (.+)", reason)
    return found[1] if found else NOT_TOLD


def _no_choice(
    key: str, value: str, texts: Sequence[str], *, names: Sequence[str], several: bool
) -> ConfigError:
    """Return the error for a value outside a closed set, or not a list of such values."""
    close = list(dict.fromkeys(each for text in texts if (each := nearest(text, names))))
    rule = f"must be one of {', '.join(names)}"
    if _takes_list(key):
        near = (f"[{', '.join(close)}]",) if close else ()
        return ConfigError(key, value, f"must be a list of {', '.join(names)}", nearest=near)
    if several:
        return ConfigError(key, value, rule, nearest=FirstOf(close))
    return refused_value(key, value, rule, close[0] if close else None)


def _no_section(key: str, value: str, section: str) -> ConfigError:
    """Return the error for a value of a section; it may be an option of the group around it."""
    group = section.partition(".")[0]
    guess = f"{group}={value}" if value in _options(group) else None
    first = next(each for each in all_keys() if each.startswith(f"{section}."))
    return ConfigError(key, value, f"is a section of keys, like {first}", guess=guess)


def _kinds(key: str) -> Iterator[object]:
    """Yield the types of a key's value or list elements, null excepted."""
    hint = type_of(key)
    for kind in typing.get_args(hint) or (hint,):
        if kind not in (NoneType, Ellipsis):
            yield kind


def _kind(key: str) -> object:
    return next(_kinds(key), None)


def _takes_list(key: str) -> bool:
    return typing.get_origin(type_of(key)) is tuple


def _usual(key: str) -> object:
    """Return the default of a key; if that is null, 1 for numbers and None otherwise."""
    found = default_of(key)
    return 1 if found is None and _kind(key) in (int, float) else found


def _no_number(key: str, value: str, texts: Sequence[str], whole: bool) -> ConfigError:
    """Return the error for text in place of a number, with the numbers that it may mean or an
    example.
    """
    rule = "must be a whole number" if whole else "must be a number"
    found = dict.fromkeys(number for text in texts for number in _numbers(text, key, whole))
    if found:
        return ConfigError(key, value, rule, nearest=tuple(map(FirstOf, zip(found, strict=True))))
    return ConfigError(key, value, f"{rule}, like {as_typed(_usual(key))}")


def _numbers(text: str, key: str, whole: bool) -> list[float]:
    """Return the numbers that a text may mean, likeliest first: 4k is 4096 for keys of IN_BINARY
    and 4000 for others; 5% is 0.05.
    """
    match = re.match(r"\s*(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*([a-z%]*)", text.lower())
    found = inf if match is None else float(match[1])
    if match is None or not isfinite(found):
        return []
    power = SUFFIXES.get(match[2], 0)
    bases = (1024, 1000) if key in IN_BINARY else (1000, 1024)
    numbers = [found * base**power for base in bases] if power else [found]
    if match[2] == "%":
        return [] if whole else [found / 100]
    return [round(number) if whole else number for number in numbers]


SUFFIXES = {"k": 1, "m": 2, "g": 3, "b": 3}  # behind a number -> power of a thousand
IN_BINARY = ("train.seq_len", "model.vocab_size", "model.hidden_size", "model.ffn_hidden_size")
