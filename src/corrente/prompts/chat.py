"""Render conversations with the tokenizer's chat template, or with the one that ``chat.template`` names.

The text is rendered first and encoded without adding special tokens, since the template writes them. transformers'
``apply_chat_template`` does the same, so the ids are the same. Other variables of a template (such as ``enable_thinking``) come
from ``chat.template_kwargs``. transformers is imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from corrente.common.plain_data import plain_text
from corrente.config import Chat as ChatConfig
from corrente.data.messages import content_text
from corrente.errors import ConfigError, RolloutError, error_text
from corrente.prompts.base import Message, Tool
from corrente.prompts.tokenizer import Tokenizer

_MARK = "\u29c9\u29c9"
"""A text that no chat template contains by itself."""


class ChatTemplate:
    """Implements ChatEncoder. ``tools`` are offered in every conversation."""

    def __init__(self, tokenizer: Tokenizer, config: ChatConfig, *, tools: Sequence[Tool] = ()) -> None:
        self._tokenizer, self._config, self._tools = tokenizer, config, tuple(tools)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, generation: bool = True
    ) -> str:
        return self._render(messages, tools, add_generation_prompt=generation)

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None) -> tuple[str, list[int]]:
        if messages and messages[-1].get("role") == "assistant":
            text = self._render(messages, tools, continue_final_message=True)
        else:
            text = self._render(messages, tools, add_generation_prompt=True)
        return text, self.encode(text)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.hf.encode(plain_text(text), add_special_tokens=False))

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] | None, **options: bool) -> str:
        conversation = [dict(message) for message in messages]
        if self._config.system and (not conversation or conversation[0].get("role") != "system"):
            conversation.insert(0, {"role": "system", "content": self._config.system})
        template, parts = self._template, self._takes_parts_only
        written = [with_text(message, parts=parts) for message in conversation]
        try:
            return self._apply_template(template, written, self._tools if tools is None else tools, **options)
        except Exception as error:  # a template is a program: it raises what it likes about what it is given
            raise RolloutError(f"the chat template refuses the messages: {error_text(error)}") from error

    def _apply_template(
        self, template: str | None, conversation: Sequence[Message], tools: Sequence[Tool] = (), **options: bool
    ) -> str:
        text = self._tokenizer.hf.apply_chat_template(
            conversation,
            tools=[dict(tool) if isinstance(tool, Mapping) else tool for tool in tools] or None,
            chat_template=template,
            tokenize=False,
            **options,
            **self._config.template_kwargs,
        )
        return plain_text(str(text))

    @cached_property
    def _takes_parts_only(self) -> bool:
        """True if the template shows content that is a list of parts, and none that is text."""
        asked, template = {"role": "user", "content": _MARK}, self._template

        def shows(message: Message) -> bool:
            try:
                return _MARK in self._apply_template(template, [message])
            except Exception:  # as in _render
                return False

        return not shows(asked) and shows(with_text(asked, parts=True))

    @cached_property
    def _template(self) -> str | None:
        """The configured template; None for the tokenizer's own. ConfigError where there is neither."""
        if self._config.template:
            return read_template(self._config.template)
        if not getattr(self._tokenizer.hf, "chat_template", None):
            raise ConfigError(
                f"chat.template is empty, and the tokenizer of {self._tokenizer.path} has no chat template of its own, so "
                "conversations cannot be rendered: name a file with a Jinja template, or give prompts as plain text"
            )
        return None


def with_text(message: Message, *, parts: bool = False) -> dict[str, Any]:
    """The message with its content as one text, or as ``parts``, a list of one text. RolloutError for parts that are no text."""
    content = message.get("content")
    if content is None:
        return dict(message)
    text = content_text(content)
    return {**message, "content": [{"type": "text", "text": text}] if parts else text}


def read_template(template: str) -> str:
    """Return a template that is given as text, recognised by its braces, or as the path of a file. ConfigError for neither."""
    if "{%" in template or "{{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat.template = {template!r}: it must be a file with a Jinja template, or the template itself ({error})"
        ) from None


def parse_conversation(value: Any) -> tuple[dict[str, Any], ...] | None:
    """The messages of a column's value; None when it is not a list of messages.

    Keys whose value is None are left out of all dicts: tables of rows have every key of every row in each.
    """
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value):
        return None
    return tuple({str(name): item for name, item in _without_none(message).items()} for message in value)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
