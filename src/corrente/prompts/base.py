"""Protocols for sources of prompts and for rendering conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from corrente.data.types import Prompt

Encode = Callable[[str], list[int]]
"""Raw text to token ids."""
Message = Mapping[str, Any]
"""One message of a conversation: "role", "content", and other keys that the template knows ("tool_calls", "name", ...)."""
Tool = Callable[..., Any] | Mapping[str, Any]
"""A tool as a chat template takes it: a Python function with type hints and a docstring, or its JSON schema."""
ENVIRONMENT_COLUMN = "environment"
"""Column of a row that names its environment, where there are several."""
NO_PROMPT: tuple[Message, ...] = ({"role": "user", "content": ""},)
"""The prompt of a row that has none, because its environment brings the first words."""


class Prompts(Protocol):
    """Contract.

    - ``next_prompt`` returns the next prompt, and None at the end of the last epoch. The order depends on the seed only; each
      prompt has an id that is unique in the run ("<epoch>/<row>").
    - ``find_prompts`` rebuilds prompts from their ids, in order: a resumed run admits the unfinished ones again.
    - ``state`` returns the position as plain JSON data; after ``restore`` of it ``next_prompt`` continues from there.
    - ``describe`` returns one line for the user.
    """

    def next_prompt(self) -> Prompt | None: ...

    def find_prompts(self, ids: Sequence[str]) -> tuple[Prompt, ...]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def describe(self) -> str: ...


class ChatEncoder(Protocol):
    """Contract: renders a conversation as the model was trained to read it.

    - ``render`` returns the text. With ``generation`` it ends where the next answer begins. ``tools`` None takes the tools the
      encoder was made with. ConfigError where there is no template; RolloutError where the template refuses these messages.
    - ``prompt`` returns text and token ids (T,) of a conversation that is to be answered. A last message of the assistant is left
      open, so that the model continues it.
    - ``encode`` returns the ids of rendered text, without adding special tokens.
    """

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, generation: bool = True
    ) -> str: ...

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None) -> tuple[str, list[int]]: ...

    def encode(self, text: str) -> list[int]: ...
