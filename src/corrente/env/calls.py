"""Reads the tool calls out of a turn of the policy, in the format its chat template teaches.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, text around.    Hermes, Qwen 2.5 and 3
llama3    {"name": ..., "parameters": {...}} as the whole answer, several joined by ";"                  Llama 3.1 and later
native    what the tokenizer's response template says (transformers), where it has one
pattern   a regular expression with a group "json", or groups "name" and "arguments"

Text that looks like a call and cannot be read is a call with an ``error``. The policy reads the error, and can learn from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from corrente.common.plain_data import plain_data, plain_text, safe_text
from corrente.errors import ConfigError

PYTHON_TAG = "<|python_tag|>"
LLAMA3 = (PYTHON_TAG, '"parameters": dictionary')
"""Texts that only chat templates of Llama's format contain."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call: a name and arguments, or the reason why it cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = {}
    error: str = ""

    def as_message(self) -> dict[str, Any]:
        """Render the call as an entry of a chat message's ``tool_calls``."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ParsedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a turn: its calls, in order, and the text around them."""

    content: str
    calls: tuple[ToolCall, ...] = ()


class TurnParser(Protocol):
    """Splits a turn into content and calls. ``before``: the text of its context, which may hold the turn's beginning."""

    def __call__(self, text: str, *, before: str = "") -> ParsedTurn: ...


def parse_plain_text(text: str, *, before: str = "") -> ParsedTurn:
    """Parse a turn where there are no tools: all of it is content."""
    return ParsedTurn(content=text)


_HERMES = re.compile(r"<tool_call>(?P<json>.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_hermes(text: str, *, before: str = "") -> ParsedTurn:
    """Parse the Hermes format; see the module. A call without its closing tag is one that cannot be read."""
    return pattern_parser(_HERMES)(text)


def pattern_parser(pattern: re.Pattern[str]) -> TurnParser:
    """Make a parser whose calls are the matches of ``pattern``; the rest of the text is content."""

    def parse(text: str, *, before: str = "") -> ParsedTurn:
        found = [_call_from_match(match.groupdict()) for match in pattern.finditer(text)]
        return ParsedTurn(content=pattern.sub("", text).strip() if found else text, calls=tuple(found))

    return parse


def parse_llama3(text: str, *, before: str = "") -> ParsedTurn:
    """Parse the format of Llama 3; see the module. An answer that does not begin like a call is content."""
    body = text.strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).strip()
    if not tagged and not re.match(r'\{\s*"(name|type|function|parameters)"', body):
        return ParsedTurn(content=text)
    return ParsedTurn(content="", calls=tuple(_calls_from_objects(body)))


def native_parser(parse_response: Callable[[str, str], Mapping[str, Any]]) -> TurnParser:
    """Make a parser of the tokenizer's ``parse_response(text, before)``, which raises ValueError for text it cannot read."""

    def parse(text: str, *, before: str = "") -> ParsedTurn:
        try:
            message = parse_response(text, before)
            calls = tuple(_call_from_value(call) for call in message.get("tool_calls") or ())
            content = plain_text(str(message.get("content") or ""))
        except Exception as error:  # a response template is a program, and its input is whatever a model writes
            return ParsedTurn(content=text, calls=(ToolCall(error=_first_line(error)),))
        return ParsedTurn(content=content, calls=calls)

    return parse


def choose_parser(how: str, *, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> TurnParser:
    """The parser that ``env.calls`` asks for. ConfigError where there is none of that name."""

    def through(template: Mapping[str, Any] | None) -> TurnParser:
        return native_parser(
            lambda text, before: tokenizer.parse_response(text, template, prefix=before, tools=[dict(t) for t in tools])
        )

    has_native = bool(getattr(tokenizer, "response_template", None))
    if how == "auto":
        shown = str(getattr(tokenizer, "chat_template", None) or "")
        llama = "<tool_call>" not in shown and any(sign in shown for sign in LLAMA3)
        how = "native" if has_native else "llama3" if llama else "hermes"
    match how:
        case "hermes":
            return parse_hermes
        case "llama3":
            return parse_llama3
        case "native":
            if not has_native:
                raise ConfigError(
                    'env.calls = "native": the tokenizer has no response template; use hermes, llama3, a file, or a pattern'
                )
            return through(None)
        case _:
            return through(_read_template(how)) if how.endswith(".json") else pattern_parser(compile_call_pattern(how))


def verify_call_format(how: str) -> None:
    """Raise ConfigError for an ``env.calls`` that names no format."""
    if how.endswith(".json"):
        _read_template(how)
    elif how not in ("auto", "hermes", "llama3", "native"):
        compile_call_pattern(how)


def compile_call_pattern(pattern: str) -> re.Pattern[str]:
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


def _read_template(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"env.calls = {path!r}: it must be a JSON file with a response template ({error})") from None
    if not isinstance(found, dict) or "fields" not in found:
        raise ConfigError(f'env.calls = {path!r}: a response template is an object with "fields"')
    return found


def _call_from_match(groups: Mapping[str, str | None]) -> ToolCall:
    if groups.get("json") is not None:
        return _call_from_json(str(groups["json"]))
    return _call_from_value({"name": groups.get("name"), "arguments": (groups.get("arguments") or "").strip() or "{}"})


def _call_from_json(text: str) -> ToolCall:
    try:
        return _call_from_value(json.loads(text))
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"this is not JSON: {_first_line(error)}")


def _calls_from_objects(text: str) -> Iterator[ToolCall]:
    """Read JSON objects one after another, separated by ";"."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield ToolCall(error=f"this is not JSON: {_first_line(error)}")
            return
        yield _call_from_value(value)
        at = len(text) - len(text[end:].lstrip(" \n\t;,"))


def _call_from_value(value: Any) -> ToolCall:
    """Read a call of any of the usual shapes: wrapped in "function" or not, arguments as an object or as its JSON."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        return ToolCall(error='a call must be an object with "name" and "arguments"')
    name = plain_text(value["name"])
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name=name, error=f"the arguments are not JSON: {_first_line(error)}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return ToolCall(name=name, error="the arguments must be an object")
    try:
        plain = plain_data(arguments)
    except Exception as error:
        return ToolCall(name=name, error=f"the arguments are no JSON: {_first_line(error)}")
    return ToolCall(name=name, arguments={str(key): item for key, item in plain.items()})


def _first_line(error: Exception) -> str:
    return (safe_text(error).splitlines() or [""])[0] or type(error).__name__
