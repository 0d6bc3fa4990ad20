"""What a conversation needs of a tokenizer: its chat template with the tools on offer, text out of tokens with nothing left out,
and the calls in what was said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from corrente.data.types import Completion, Tokens
from corrente.env.calls import Parsed, Parser, choose, plain
from corrente.errors import ConfigError, RolloutError
from corrente.prompts.base import ChatEncoder, Message

DESCRIPTION = (
    "You may call functions. Here they are, as JSON schemas:\n<tools>\n{tools}\n</tools>\n"
    'To call one, write a JSON object with its name and arguments between tags:\n<tool_call>\n{{"name": "<name>", '
    '"arguments": {{<arguments>}}}}\n</tool_call>'
)
"""How tools are described to a policy whose chat template does not describe them: in the format that Hermes models began."""
ANY: Message = {"role": "user", "content": "."}
_MARK = "\u29c9\u29c9"
"""A text that no template says by itself."""
RESPONSE = "<tool_response>\n{content}\n</tool_response>"
"""How an answer is shown to it, in a message of the user."""


class Hf(Protocol):
    """Where the tokenizer of transformers is found: prompts/tokenizer.py."""

    @property
    def hf(self) -> Any: ...


class ChatRenderer:
    """A chat template with its tokenizer. ``tools``: JSON schemas of what the policy may call; ``calls``: see calls.choose."""

    def __init__(
        self, chat: ChatEncoder, tokenizer: Hf, *, tools: Sequence[Mapping[str, Any]] = (), calls: str = "auto"
    ) -> None:
        self._chat, self._tokenizer, self._tools, self._calls = chat, tokenizer, tuple(tools), calls

    def render(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        """The conversation as text. RolloutError where the template refuses it."""
        return self._chat.render(self._described(messages), tools=self._offered, generation=generation)

    def opening(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """The first context, as text and as tokens."""
        return self._chat.prompt(self._described(messages), tools=self._offered)

    def encode(self, text: str) -> list[int]:
        """Tokens of rendered text."""
        return self._chat.encode(text)

    def check(self, *, kept: bool) -> None:
        """Raise ConfigError where there is no chat template, for calls in no format there is, and where what was said cannot be
        kept."""
        self._parse("")
        if _MARK not in self.render([ANY, {"role": "assistant", "content": _MARK}, ANY]) and kept:
            raise ConfigError(
                'env.history = "kept": the chat template does not show what was said as it is; use "rendered"'
            )

    def after_turn(self, messages: Sequence[Message]) -> str:
        """What the template writes after any turn of the policy when ``messages`` follow. RolloutError where it does not show."""
        shown = self.render([ANY, {"role": "assistant", "content": _MARK}, *messages])
        before, found, added = shown.partition(_MARK)
        if not found or _MARK in added or not before:
            raise RolloutError('env.history = "kept": the chat template does not show what was said as it is')
        return added

    def text(self, tokens: Tokens) -> str:
        """All that ``tokens`` stand for, special ones included, as it is."""
        ids = [int(token) for token in tokens]
        return str(self._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def said(self, completion: Completion) -> str:
        """The text of a completion without the special token that ended it, if one did."""
        tokens = completion.tokens
        ended = completion.finish_reason == "stop" and len(tokens) > 0 and int(tokens[-1]) in self._special
        return self.text(tokens[:-1] if ended else tokens)

    def parsed(self, said: str, *, before: str) -> Parsed:
        """What was said, taken apart; where there are no tools nothing is a call. ``before``: the text of its context."""
        return self._parse(said, before=before)

    def leading_special(self, text: str) -> str:
        """The special token that ``text`` begins with; empty where it begins with none."""
        names = (self._hf.convert_ids_to_tokens(token) for token in self._special)
        return max((name for name in names if name and text.startswith(name)), key=len, default="")

    @cached_property
    def _offered(self) -> tuple[Mapping[str, Any], ...]:
        """What the template is given: nothing, where it does not show it anyway."""
        return self._tools if self.shows_tools else ()

    @cached_property
    def shows_tools(self) -> bool:
        """There are tools, and the template describes them."""
        if not self._tools:
            return False
        return self._chat.render([ANY], tools=self._tools) != self._chat.render([ANY], tools=())

    def _described(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages; where the template does not show tools, these are described in a system message, and what they answer is
        a message of the user."""
        if not self._tools or self.shows_tools:
            return messages
        messages = _without_tool_role(messages)
        text = DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in self._tools))
        if messages and messages[0].get("role") == "system":
            first = {**messages[0], "content": f"{messages[0].get('content', '')}\n\n{text}"}
            return [first, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    @cached_property
    def _parse(self) -> Parser:
        return choose(self._calls, tokenizer=self._hf, tools=self._tools) if self._tools else plain

    @property
    def _hf(self) -> Any:
        return self._tokenizer.hf

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(int(token) for token in self._hf.all_special_ids) | frozenset(
            int(token) for token, added in self._hf.added_tokens_decoder.items() if added.special
        )


def _without_tool_role(messages: Sequence[Message]) -> list[Message]:
    """Answers of tools as messages of the user, those that follow one another in one."""
    out: list[Message] = []
    answering = False
    for message in messages:
        if message.get("role") != "tool":
            out.append({key: value for key, value in message.items() if key != "tool_calls"})
            answering = False
            continue
        text = RESPONSE.format(content=message.get("content", ""))
        before = f"{out.pop()['content']}\n" if answering else ""
        out.append({"role": "user", "content": before + text})
        answering = True
    return out
