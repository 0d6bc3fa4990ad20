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

from corrente.config import Chat as ChatConfig
from corrente.errors import ConfigError, RolloutError
from corrente.prompts.base import Message, Tool
from corrente.prompts.tokenizer import Tokenizer


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
        return list(self._tokenizer.hf.encode(text, add_special_tokens=False))

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] | None, **options: bool) -> str:
        conversation = [dict(message) for message in messages]
        if self._config.system and (not conversation or conversation[0].get("role") != "system"):
            conversation.insert(0, {"role": "system", "content": self._config.system})
        offered = self._tools if tools is None else tools
        template, tokenizer = self._template, self._tokenizer.hf
        try:
            return str(
                tokenizer.apply_chat_template(
                    conversation,
                    tools=[dict(tool) if isinstance(tool, Mapping) else tool for tool in offered] or None,
                    chat_template=template,
                    tokenize=False,
                    **options,
                    **self._config.template_kwargs,
                )
            )
        except Exception as error:  # a template is a program: it raises what it likes about what it is given
            raise RolloutError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

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
    """The messages of a column's value, without keys whose value is None; None when it is not a list of messages."""
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value):
        return None
    return tuple({str(k): v for k, v in message.items() if v is not None} for message in value)
