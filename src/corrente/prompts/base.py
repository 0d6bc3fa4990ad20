"""Where work comes from, and how a conversation becomes what a model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from corrente.data.types import Prompt

Encode = Callable[[str], list[int]]
"""Raw text to token ids."""
Message = Mapping[str, Any]
"""One message of a conversation: "role", "content", and what else its template knows ("tool_calls", "name", ...)."""
Tool = Callable[..., Any] | Mapping[str, Any]
"""A tool as a chat template takes it: a Python function with type hints and a docstring, or its JSON schema."""


class Prompts(Protocol):
    """Contract.

    - ``next`` gives the next prompt, None at the end of the last epoch. Order depends on the seed alone; each prompt has an id
      of its own within the run ("<epoch>/<row>").
    - ``find`` rebuilds prompts from their ids, in order: a resumed run admits again what was unfinished.
    - ``state`` is plain JSON data; ``restore`` of it makes ``next`` continue where it stood.
    """

    def next(self) -> Prompt | None: ...

    def find(self, ids: Sequence[str]) -> tuple[Prompt, ...]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def describe(self) -> str: ...


class ChatEncoder(Protocol):
    """Contract: a conversation as the model was trained to read it.

    - ``render`` gives the text. With ``generation``, it ends where the next answer begins. ``tools`` None: those it was made
      with. ConfigError where there is no template; RolloutError where the template refuses these messages.
    - ``prompt`` gives text and token ids (T,) of a conversation that is to be answered; a last message of the assistant is
      left open, to be gone on with.
    - ``encode`` gives the ids of text that was rendered: nothing is put before it.
    """

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, generation: bool = True
    ) -> str: ...

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None) -> tuple[str, list[int]]: ...

    def encode(self, text: str) -> list[int]: ...
