"""Which tools a turn of the policy calls: read from its text, in the format its chat template teaches.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, text around.    Hermes, Qwen 2.5 and 3
llama3    {"name": ..., "parameters": {...}} as the whole answer, several joined by ";"                  Llama 3.1 and later
native    what the tokenizer's response template says (transformers), where it has one
pattern   a regular expression with a group "json", or groups "name" and "arguments"

What looks like a call and cannot be read is a call too: one with an ``error``, which the policy is told, and can learn from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from corrente.errors import ConfigError

PYTHON_TAG = "<|python_tag|>"
LLAMA3 = (PYTHON_TAG, '"parameters": dictionary')
"""What chat templates say that teach Llama's format."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call: a name and arguments; or why it cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = {}
    error: str = ""

    def message(self) -> dict[str, Any]:
        """As a chat message lists it."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """A turn taken apart: its calls, in order, and the text that is none."""

    content: str
    calls: tuple[ToolCall, ...] = ()


class Parser(Protocol):
    """Takes a turn apart. ``before``: the text of its context, which may have begun it."""

    def __call__(self, text: str, *, before: str = "") -> Parsed: ...


def plain(text: str, *, before: str = "") -> Parsed:
    """There are no tools, so nothing is a call."""
    return Parsed(content=text)


_HERMES = re.compile(r"<tool_call>(?P<json>.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes(text: str, *, before: str = "") -> Parsed:
    """See the module. A call that is not closed is one that cannot be read."""
    return by_pattern(_HERMES)(text)


def by_pattern(pattern: re.Pattern[str]) -> Parser:
    """Calls are what ``pattern`` finds, and the content is what it leaves."""

    def parse(text: str, *, before: str = "") -> Parsed:
        found = [_found(match.groupdict()) for match in pattern.finditer(text)]
        return Parsed(content=pattern.sub("", text).strip() if found else text, calls=tuple(found))

    return parse


def llama3(text: str, *, before: str = "") -> Parsed:
    """See the module. An answer that does not begin like a call is none."""
    body = text.strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).strip()
    if not tagged and not re.match(r'\{\s*"(name|type|function|parameters)"', body):
        return Parsed(content=text)
    return Parsed(content="", calls=tuple(_objects(body)))


def native(parse_response: Callable[[str, str], Mapping[str, Any]]) -> Parser:
    """Through the tokenizer: ``parse_response(text, before)`` gives a message, and raises ValueError for what cannot be read."""

    def parse(text: str, *, before: str = "") -> Parsed:
        try:
            message = parse_response(text, before)
        except ValueError as error:
            return Parsed(content=text, calls=(ToolCall(error=_one_line(error)),))
        calls = message.get("tool_calls") or ()
        return Parsed(content=str(message.get("content") or ""), calls=tuple(_read(call) for call in calls))

    return parse


def choose(how: str, *, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> Parser:
    """The parser that ``env.calls`` asks for. ConfigError where there is none of that name."""

    def through(template: Mapping[str, Any] | None) -> Parser:
        return native(
            lambda text, before: tokenizer.parse_response(text, template, prefix=before, tools=[dict(t) for t in tools])
        )

    has_native = bool(getattr(tokenizer, "response_template", None))
    if how == "auto":
        shown = str(getattr(tokenizer, "chat_template", None) or "")
        llama = "<tool_call>" not in shown and any(sign in shown for sign in LLAMA3)
        how = "native" if has_native else "llama3" if llama else "hermes"
    match how:
        case "hermes":
            return hermes
        case "llama3":
            return llama3
        case "native":
            if not has_native:
                raise ConfigError(
                    'env.calls = "native": the tokenizer has no response template; use hermes, llama3, a file, or a pattern'
                )
            return through(None)
        case _:
            return through(_template(how)) if how.endswith(".json") else by_pattern(compiled(how))


def verify(how: str) -> None:
    """ConfigError for an ``env.calls`` that cannot be."""
    if how.endswith(".json"):
        _template(how)
    elif how not in ("auto", "hermes", "llama3", "native"):
        compiled(how)


def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression, which must say where in a match the call is."""
    try:
        found = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"env.calls = {pattern!r}: it must be a regular expression ({error})") from None
    groups = set(found.groupindex)
    if "json" not in groups and not {"name", "arguments"} <= groups:
        raise ConfigError(
            f"env.calls = {pattern!r}: it must be auto, hermes, llama3, native, a .json file, or a regular expression with a "
            'group "json", or groups "name" and "arguments"'
        )
    return found


def _template(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"env.calls = {path!r}: it must be a JSON file with a response template ({error})") from None
    if not isinstance(found, dict) or "fields" not in found:
        raise ConfigError(f'env.calls = {path!r}: a response template is an object with "fields"')
    return found


def _found(groups: Mapping[str, str | None]) -> ToolCall:
    if groups.get("json") is not None:
        return _from_json(str(groups["json"]))
    return _read({"name": groups.get("name"), "arguments": (groups.get("arguments") or "").strip() or "{}"})


def _from_json(text: str) -> ToolCall:
    try:
        return _read(json.loads(text))
    except ValueError as error:
        return ToolCall(error=f"this is not JSON: {_one_line(error)}")


def _objects(text: str) -> Iterator[ToolCall]:
    """JSON objects one after another, ";" between them."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError as error:
            yield ToolCall(error=f"this is not JSON: {_one_line(error)}")
            return
        yield _read(value)
        at = len(text) - len(text[end:].lstrip(" \n\t;,"))


def _read(value: Any) -> ToolCall:
    """A call of any of the usual shapes: wrapped in "function" or not, arguments an object or its JSON."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        return ToolCall(error='a call must be an object with "name" and "arguments"')
    name = str(value["name"])
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return ToolCall(name=name, error=f"the arguments are not JSON: {_one_line(error)}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return ToolCall(name=name, error="the arguments must be an object")
    return ToolCall(name=name, arguments={str(key): item for key, item in arguments.items()})


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
