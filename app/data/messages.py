"""Messages of the rows of chat data, in the form that chat templates read.

A row is {"messages": […]}, {"conversations": […]}, or {"prompt", "completion"} (texts, or lists of
messages); with "tools", a list or a text of JSON, and "system", a text. A message is {"role",
"content"} or ShareGPT's {"from", "value"}; a content is a text or a list of parts of text. An
answer with "weight" 0 or "train" false is not trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from app.data.chat_template import BEGIN, END
from app.data.faults import Fault
from app.data.json_lines import parsed

WEIGHT = "weight"  # 0 of an answer that is not trained
TRAINED = (WEIGHT, "train")  # keys of OpenAI and of axolotl
CALL = "function_call"  # of ShareGPT: the assistant calls a tool
# What may stand before a message of each role; None: the beginning.
BEFORE: Mapping[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None, "system"),
    "user": (None, "system", "developer", "assistant"),
    "assistant": (None, "system", "developer", "user", "tool"),
    "tool": ("assistant", "tool"),
}
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    CALL: "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


class Form(Enum):
    """Form of the rows of a file, by the key that tells it."""

    messages = "messages"
    completion = "completion"
    conversations = "conversations"


COLUMNS = (*(form.value for form in Form), "prompt", "tools", "system")  # that are read of a row


def form_of(row: Any) -> Form:
    """Return the form of a row. Raises Fault."""
    found = [form for form in Form if isinstance(row, Mapping) and row.get(form.value) is not None]
    if len(found) != 1:
        names = [f"{each!r}" for each in row] if isinstance(row, Mapping) else ["no object"]
        rule = "is no conversation: it needs one of 'messages', 'prompt' with 'completion', and "
        raise Fault(f"{rule}'conversations', and has {', '.join(names)}")
    return found[0]


def messages_of(row: Any, form: Form) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return the messages of a row, and its tools. Raises Fault, also for roles out of order."""
    if not isinstance(row, Mapping) or row.get(form.value) is None:
        raise Fault(f"has no {form.value!r}, as the first one")
    tools = row.get("tools") or None
    if isinstance(tools, str):
        tools = parsed(tools)
    if tools is not None and not isinstance(tools, list):
        raise Fault("holds tools that are no list")
    if form is Form.completion:
        said = [*_listed(row, "prompt", "user"), *_listed(row, "completion", "assistant")]
    else:
        said = row[form.value]
        if not _objects(said):
            raise Fault(f"holds no list of objects in {form.value!r}")
    found = [_message(number, each) for number, each in enumerate(said, start=1)]
    if (system := row.get("system")) and (not found or found[0]["role"] != "system"):
        found = [_message(0, {"role": "system", "content": system}), *found]
    _check(found)
    return found, tools


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _named(call: Mapping[str, Any]) -> bool:
    function = call.get("function") or call
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _listed(row: Mapping[str, Any], key: str, role: str) -> list[Mapping[str, Any]]:
    value = row.get(key)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not _objects(value):
        raise Fault(f"holds neither a text nor a list of messages in {key!r}")
    return list(value)  # type: ignore[arg-type]  # a list, as checked


def _message(number: int, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its role and its content as a text."""
    kept = {key: value for key, value in said.items() if value is not None}  # parquet fills in null
    weights, key = {key: kept.pop(key) for key in TRAINED if key in kept}, "content"
    if "role" not in kept and "from" in kept:
        name = kept.pop("from")
        if not isinstance(name, str) or name not in SHAREGPT:
            known = ", ".join(SHAREGPT)
            raise Fault(f"message {number} is from {name!r}, which is none of {known}")
        if name == CALL:
            kept = {"content": "", "tool_calls": [*_calls(number, kept)]}
        kept["role"], key = SHAREGPT[name], "content" if name == CALL else "value"
    role = kept.get("role")
    if not isinstance(role, str) or role not in BEFORE:
        rule = f"message {number} has the role {role!r}, which is none of {', '.join(BEFORE)}"
        raise Fault(rule)
    content = kept.pop(key, None)
    if isinstance(content, list):
        content = "".join(_parts(f"message {number}, of {role},", content))
    calls = role == "assistant" and kept.get("tool_calls")
    if calls and not (_objects(calls) and all(map(_named, calls))):
        raise Fault(f"message {number}, of {role}, has tool_calls that are no list of functions")
    if content is None and not calls:
        raise Fault(f"message {number}, of {role}, has no {key!r}")
    if content is not None and not isinstance(content, str):
        raise Fault(f"message {number}, of {role}, holds no text in {key!r}")
    weight = _weight(f"message {number}, of {role},", role, weights)
    return {**kept, **weight, "content": content}


def _weight(message: str, role: str, weights: Mapping[str, Any]) -> dict[str, int]:
    """Return what marks an answer that is not trained; nothing for other messages."""
    for key, weight in weights.items():
        if weight not in (0, 1):
            raise Fault(f"{message} has {key}={weight!r}, which is neither 0 nor 1")
        if weight and role != "assistant":
            rule = f"{message} has {key}={weight!r}: only what the assistant says is trained"
            raise Fault(rule)
    return {WEIGHT: 0} if role == "assistant" and not all(weights.values()) else {}


def _parts(message: str, parts: Sequence[Any]) -> Iterator[str]:
    """Yield the texts of a content that is a list of parts."""
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            rule = f"{message} has a part of type {kind!r}: only parts of type 'text' are read"
            raise Fault(rule)
        if not isinstance(part.get("text"), str):
            raise Fault(f"{message} has a part of type 'text' without a text")
        yield part["text"]


def _calls(number: int, said: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the calls of a function_call as `tool_calls` has them."""
    value = said.get("value")
    found = parsed(value) if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else None
    for call in found if isinstance(found, list) else [found]:
        match call:
            case {"name": str(name), "arguments": dict() | str() as arguments}:
                if isinstance(arguments, str):
                    arguments = parsed(arguments)
                function = {"name": name, "arguments": arguments}
                yield {"type": "function", "function": function}
            case _:
                rule = f"message {number}, from {CALL}, is no JSON of objects with 'name' and "
                raise Fault(f"{rule}'arguments'")


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise Fault for messages out of order, empty ones, or none of the assistant."""
    before: str | None = None
    for number, message in enumerate(messages, start=1):
        role, content = message["role"], message["content"]
        if before not in BEFORE[role]:
            after = f"follows one of {before}" if before else "is the first"
            raise Fault(f"message {number}, of {role}, {after}: roles are out of order")
        before = role
        if not (content and content.strip()) and not message.get("tool_calls"):
            raise Fault(f"message {number}, of {role}, is empty")
        if content and (BEGIN in content or END in content):
            raise Fault(f"message {number} holds U+FDD0 or U+FDD1, which are no characters")
    if before is None or not any(message["role"] == "assistant" for message in messages):
        raise Fault("has no turn of the assistant, so nothing is learnt from it")
