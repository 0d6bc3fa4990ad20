"""Renders conversations with a tokenizer's chat template and the tools on offer, decodes tokens without loss, and parses
calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from corrente.data.messages import content_text
from corrente.data.types import Completion, Tokens
from corrente.env.calls import ParsedTurn, TurnParser, choose_parser, parse_plain_text
from corrente.errors import ConfigError, RolloutError
from corrente.prompts.base import ChatEncoder, Message

TOOLS_DESCRIPTION = (
    "You may call functions. Here they are, as JSON schemas:\n<tools>\n{tools}\n</tools>\n"
    'To call one, write a JSON object with its name and arguments between tags:\n<tool_call>\n{{"name": "<name>", '
    '"arguments": {{<arguments>}}}}\n</tool_call>'
)
"""Description of tools for a policy whose chat template does not render them, in the format of Hermes models."""
ANY_MESSAGE: Message = {"role": "user", "content": "."}
_MARK = "\u29c9\u29c9"
"""A text that no chat template contains by itself."""
TOOL_RESPONSE = "<tool_response>\n{content}\n</tool_response>"
"""A tool's answer in a user message, for such a policy."""


class HasTokenizer(Protocol):
    """An object that carries a transformers tokenizer as ``hf``; see prompts/tokenizer.py."""

    @property
    def hf(self) -> Any: ...


class ChatRenderer:
    """A chat template with its tokenizer. ``tools``: JSON schemas of the functions the policy may call. ``calls``: their
    format; see ``calls.choose_parser``."""

    def __init__(
        self,
        chat: ChatEncoder,
        tokenizer: HasTokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        calls: str = "auto",
    ) -> None:
        self._chat, self._tokenizer, self._tools, self._calls = chat, tokenizer, tuple(tools), calls

    def render(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        """Render the conversation as text. RolloutError where the template refuses it."""
        return self._chat.render(
            self._with_tools_described(messages), tools=self._rendered_tools, generation=generation
        )

    def render_opening(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Render the first context, as text and as tokens."""
        return self._chat.prompt(self._with_tools_described(messages), tools=self._rendered_tools)

    def encode(self, text: str) -> list[int]:
        """Encode rendered text; no special tokens are added."""
        return self._chat.encode(text)

    def check_format(self, *, keep_history: bool) -> None:
        """Raise ConfigError where there is no chat template, where the calls' format is unknown, and where ``keep_history`` is
        asked of a template that does not show answers as they are."""
        self.parse_text("")
        if (
            _MARK not in self.render([ANY_MESSAGE, {"role": "assistant", "content": _MARK}, ANY_MESSAGE])
            and keep_history
        ):
            raise ConfigError(
                'env.history = "kept": the chat template does not show what was said as it is; use "rendered"'
            )

    def after_turn(self, messages: Sequence[Message]) -> str:
        """Text that the template adds after any turn of the policy when ``messages`` follow. RolloutError where that does not
        show."""
        shown = self.render([ANY_MESSAGE, {"role": "assistant", "content": _MARK}, *messages])
        before, found, added = shown.partition(_MARK)
        if not found or _MARK in added or not before:
            raise RolloutError('env.history = "kept": the chat template does not show what was said as it is')
        return added

    def decode_tokens(self, tokens: Tokens) -> str:
        """Decode all tokens, special ones included, without cleaning up spaces."""
        ids = [int(token) for token in tokens]
        return str(self._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def completion_text(self, completion: Completion) -> str:
        """The text of a completion without the special token that ended it, if one did."""
        tokens = completion.tokens
        ended = completion.finish_reason == "stop" and len(tokens) > 0 and int(tokens[-1]) in self._special_ids
        return self.decode_tokens(tokens[:-1] if ended else tokens)

    def parse_turn(self, text: str, *, before: str) -> ParsedTurn:
        """Split a turn's text into content and calls. ``before``: the text of its context."""
        return self.parse_text(text, before=before)

    def leading_special(self, text: str) -> str:
        """The special token that ``text`` begins with; empty where it begins with none."""
        names = (self._hf.convert_ids_to_tokens(token) for token in self._special_ids)
        return max((name for name in names if name and text.startswith(name)), key=len, default="")

    @cached_property
    def _rendered_tools(self) -> tuple[Mapping[str, Any], ...]:
        """Tools that are handed to the template: none where it does not render them."""
        return self._tools if self.shows_tools else ()

    @cached_property
    def shows_tools(self) -> bool:
        """True if there are tools and the template renders them."""
        if not self._tools:
            return False
        return self._chat.render([ANY_MESSAGE], tools=self._tools) != self._chat.render([ANY_MESSAGE], tools=())

    def _with_tools_described(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Add what the template leaves out: where it does not render tools, a system message describes them, and their answers
        become user messages."""
        if not self._tools or self.shows_tools:
            return messages
        messages = _without_tool_role(messages)
        text = TOOLS_DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in self._tools))
        if messages and messages[0].get("role") == "system":
            first = {**messages[0], "content": f"{content_text(messages[0].get('content'))}\n\n{text}"}
            return [first, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    @cached_property
    def parse_text(self) -> TurnParser:
        return choose_parser(self._calls, tokenizer=self._hf, tools=self._tools) if self._tools else parse_plain_text

    @property
    def _hf(self) -> Any:
        return self._tokenizer.hf

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(int(token) for token in self._hf.all_special_ids) | frozenset(
            int(token) for token, added in self._hf.added_tokens_decoder.items() if added.special
        )


def _without_tool_role(messages: Sequence[Message]) -> list[Message]:
    """Turn tool messages into user messages; those that follow one another become one."""
    out: list[Message] = []
    answering = False
    for message in messages:
        if message.get("role") != "tool":
            out.append({key: value for key, value in message.items() if key != "tool_calls"})
            answering = False
            continue
        text = TOOL_RESPONSE.format(content=content_text(message.get("content")))
        before = f"{out.pop()['content']}\n" if answering else ""
        out.append({"role": "user", "content": before + text})
        answering = True
    return out
