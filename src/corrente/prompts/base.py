"""Where work comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from corrente.types import Prompt


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
