"""Conversations as the model reads them: rendered by the tokenizer's chat template, or by one that ``chat.template`` names.

The text is rendered first and encoded as it is, with no special tokens added: the template writes them. That is what
``apply_chat_template`` of transformers does too, so the ids are its ids. What a template knows beyond messages and tools
(``enable_thinking``, say) is given by ``chat.template_kwargs``. Imports transformers on first use only.
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
    """Implements Chat. ``tools`` are those that every conversation offers."""

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

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] | None, **how: bool) -> str:
        said = [dict(message) for message in messages]
        if self._config.system and (not said or said[0].get("role") != "system"):
            said.insert(0, {"role": "system", "content": self._config.system})
        offered = self._tools if tools is None else tools
        template, tokenizer = self._template, self._tokenizer.hf
        try:
            return str(
                tokenizer.apply_chat_template(
                    said,
                    tools=[dict(tool) if isinstance(tool, Mapping) else tool for tool in offered] or None,
                    chat_template=template,
                    tokenize=False,
                    **how,
                    **self._config.template_kwargs,
                )
            )
        except Exception as error:  # a template is a program: it raises what it likes about what it is given
            raise RolloutError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    @cached_property
    def _template(self) -> str | None:
        """The template that is given; None for the tokenizer's own. ConfigError where there is neither."""
        if self._config.template:
            return read_template(self._config.template)
        if not getattr(self._tokenizer.hf, "chat_template", None):
            raise ConfigError(
                f"chat.template is empty, and the tokenizer of {self._tokenizer.path} has no chat template of its own, so "
                "conversations cannot be rendered: name a file with a Jinja template, or give prompts as plain text"
            )
        return None


def read_template(template: str) -> str:
    """A template given as text, recognised by its braces, or as the path of a file. ConfigError for neither."""
    if "{%" in template or "{{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat.template = {template!r}: it must be a file with a Jinja template, or the template itself ({error})"
        ) from None


def conversation(value: Any) -> tuple[dict[str, Any], ...] | None:
    """The messages of a column's value, keys that hold nothing left out; None when it is not a list of messages."""
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value):
        return None
    return tuple({str(k): v for k, v in message.items() if v is not None} for message in value)
